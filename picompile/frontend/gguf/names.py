"""Which tensor of a GGUF file is which parameter of the Hugging Face model."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.experts import expert_tensors, in_order
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.records import find_record
from picompile.frontend.gguf.rope import FREQUENCIES, LONG_FACTORS
from picompile.frontend.gguf.tensor_types import POWERINFER_MAGIC
from picompile.frontend.gguf.views import XIELU
from picompile.frontend.messages import shown

# PowerInfer's predictors, which `import-predictors` reads, and its split between two devices.
_PREDICTOR = re.compile(r"blk\.[0-9]+\.(?:fc[12]\.weight|gpu_idx|gpu_bucket)")
# Tensors that are no parameters of a model: the config has the divisors of rotary frequencies.
_IGNORED = re.compile("|".join((*map(re.escape, (FREQUENCIES, *LONG_FACTORS)), r"blk\.[0-9]+\.attn_rot_embd\.weight")))

_MODULE = re.compile(r"(?:model\.)?layers\.([0-9]+)\.(.+)")
# Numbers that files have in their metadata, and `views.py` finds there.
_MODULES = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in XIELU}
# StableLM's norms of each head, which are rows of one tensor.
_HEAD_NORM = re.compile(r"self_attn\.([qk])_layernorm\.norms\.([0-9]+)")

# Matrices of experts, of which gate and up are one parameter, and those of latent attention for keys and values.
_JOINED = re.compile(r"_exps\.|_shexp\.|\.attn_[kv]_b\.")
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")
_LATENT, _LATENT_PARTS = ".attn_kv_b.", (".attn_k_b.", ".attn_v_b.")

# PowerInfer writes down transposed, so that a neuron's weights lie together.
DOWN, TRANSPOSED_DOWN = ".ffn_down.", ".ffn_down_t."

# OPT, which llama.cpp does not have: gguf-py/gguf/tensor_mapping.py of PowerInfer at d3ebd7c.
_OPT = {
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
    "lm_head": "output",
}
_OPT_LAYER = {
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
_OPT_NAME = re.compile(r"model\.decoder\.layers\.([0-9]+)\.(.+)")


def map_names(
    header: GgufHeader, architecture: str, layers: int, parameters: Iterable[str], processor: Any
) -> dict[str, str]:
    """Return the parameters' names by the names that their tensors have in files.

    Several tensors may be one parameter: experts' gate and up projections. `parameters` are the names in the model's
    state dict; `processor` is transformers' for the architecture, whose rules for names hold.
    """
    found: dict[str, str] = {}
    name_of = _names_of(header, architecture, layers)
    mixture = find_record(header) is not None
    for parameter in parameters:
        if mixture and (tensors := expert_tensors(parameter)):
            found |= dict.fromkeys(tensors, parameter)
            continue
        whole = str(processor.preprocess_name(parameter))
        stem, dot, ending = whole.rpartition(".")
        name, suffix = (stem, dot + ending) if ending in ("weight", "bias") else (whole, "")
        # Some converters began at the base model, whose names are shorter.
        shorter = (name.split(".", count)[-1] for count in range(3))
        theirs = next((known for short in shorter if (known := name_of(short)) is not None), None)
        if theirs is None:
            processor.perform_fallback_tensor_mapping(found, suffix, "", whole)
        else:
            found.setdefault(theirs + suffix, whole)
    # Matrices of experts have no ending in the model's state dict, nor have the sinks of attention.
    found |= {f"{name}.weight": ours for name, ours in found.items() if not name.endswith((".weight", ".bias"))}
    for part in _LATENT_PARTS:
        found |= {name.replace(_LATENT, part): ours for name, ours in found.items() if _LATENT in name}
    if header.magic == POWERINFER_MAGIC:
        found |= {name.replace(DOWN, TRANSPOSED_DOWN): parameter for name, parameter in found.items() if DOWN in name}
    return found


def _names_of(header: GgufHeader, architecture: str, layers: int) -> Any:
    """Return a function from the name of a module to the name of its tensors in a file, or None."""
    if architecture == "opt":
        return _opt_name
    record = find_record(header)
    known = "llama" if architecture == "bamboo" else (record and record.names) or architecture
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == known)
    name_of = get_tensor_name_map(number, layers).get_name
    modules = _MODULES if record is None else {**_MODULES, **record.modules}

    def find(module: str) -> str | None:
        match = _MODULE.fullmatch(module)
        own = modules.get(match[2]) if match else None
        if match and (norm := _HEAD_NORM.fullmatch(match[2])):
            own = f"attn_{norm[1]}_norm.{norm[2]}"
        return name_of(module) if own is None or match is None else f"blk.{match[1]}.{own}"

    return find


def _opt_name(module: str) -> str | None:
    if match := _OPT_NAME.fullmatch(module):
        part = _OPT_LAYER.get(match[2])
        return None if part is None else f"blk.{match[1]}.{part}"
    return _OPT.get(module)


def further_tensors(header: GgufHeader, layers: int) -> list[str]:
    """Return the tensors behind the last of `layers`, which guess further tokens."""
    return [name for name in header.tensors if (match := _BLOCK.match(name)) and int(match[1]) >= layers]


def sources_by_parameter(
    header: GgufHeader, names: Mapping[str, str], left_out: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return for each parameter the tensors of the file that it is made of, those of gate before those of up.

    Raises `UnsupportedModelError` for tensors that are no parameters, and for two that are the same one.
    """
    found: dict[str, tuple[str, ...]] = {}
    unused = set(left_out)
    for name in header.tensors:
        if name in names:
            others = found.get(names[name], ())
            if others and not all(_JOINED.search(each) for each in (name, *others)):
                raise UnsupportedModelError(
                    f"{header.file}: holds {shown(others[0])} and {shown(name)}: two tensors for one parameter"
                )
            found[names[name]] = in_order((*found.get(names[name], ()), name))
        elif name not in unused and not (
            _IGNORED.fullmatch(name) or (_PREDICTOR.fullmatch(name) and header.magic == POWERINFER_MAGIC)
        ):
            raise UnsupportedModelError(
                f"{header.file}: holds {shown(name)}, which the model that its metadata describes has no place for"
            )
    return found
