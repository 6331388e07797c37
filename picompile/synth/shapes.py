"""Shapes that can be synthesized: by name, or from the `config.json` of a supported family."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.families import activation_text
from picompile.frontend.families import find_family as known_family
from picompile.frontend.json_file import read_json_object
from picompile.frontend.model_file import CONFIG, folder_name
from picompile.quantities import shortened
from picompile.spelling import did_you_mean, find_name
from picompile.synth.dense import DENSE
from picompile.synth.families import FAMILIES, SynthFamily, find_family
from picompile.synth.mixtures import MIXTURES
from picompile_passes.dialect.activations import ACTIVATIONS

# A shape that can be synthesized: the facts of a Hugging Face `config.json` of a supported family.


# No layer of a real model comes near it, and the disk is asked for the size before anything is written.
_LARGEST = 1 << 20
# With fewer dimensions there is no room for a low-rank subspace beside the constant directions.
_SMALLEST_HIDDEN = 32
# OPT's table of positions starts two rows late.
POSITION_OFFSET = 2


@dataclass(frozen=True)
class ModelShape:
    """A model's shape. `config` is the content of its `config.json`; the other fields are read from it.

    `activation` is in the dialect's text form. `query_bias`, `output_bias` and `ffn_bias` say whether these linear
    layers have a bias. `specials` are the token ids that stand for no text (start, end, padding).
    """

    name: str
    family: SynthFamily
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    activation: str
    eps: float
    rope_theta: float
    tied: bool
    query_bias: bool
    output_bias: bool
    ffn_bias: bool
    specials: tuple[int, ...]
    config: Mapping[str, Any] = field(repr=False)


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Read a `config.json`.

    Raises `UsageError` for a value that makes no sense and `UnsupportedModelError` for what synth does not make.
    """
    family = _family(name, config)
    return _read_shape(name, config, family, _activation(name, config, family))


def _read_shape(name: str, config: Mapping[str, Any], family: SynthFamily, activation: str) -> ModelShape:
    read = _Reader(name, config)
    hidden, heads = read.count(family.fields["hidden"]), read.count(family.fields["heads"])
    head_dim = read.count("head_dim", hidden // heads)
    if hidden < _SMALLEST_HIDDEN:
        raise UnsupportedModelError(f"{name}: a hidden size of {hidden} is too small; synth needs {_SMALLEST_HIDDEN}")
    if head_dim % 2 or ("head_dim" not in config and head_dim * heads != hidden):
        raise UnsupportedModelError(f"{name}: a hidden size of {hidden} cannot be divided among {heads} heads")
    shape = ModelShape(
        name=name,
        family=family,
        hidden=hidden,
        ffn=read.count(family.fields["ffn"], 4 * hidden if family.attention == "fused" else None),
        layers=read.count(family.fields["layers"]),
        heads=heads,
        kv_heads=_kv_heads(read, family, heads),
        head_dim=head_dim,
        vocab=read.count("vocab_size"),
        positions=read.count("max_position_embeddings", 2048),
        activation=activation,
        eps=read.number(family.fields["eps"], 1e-5),
        rope_theta=_Reader(name, config.get("rope_parameters") or config).number("rope_theta", 10000.0),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        query_bias=family.query_bias(config),
        output_bias=family.output_bias(config),
        ffn_bias=family.ffn_bias(config),
        specials=special_tokens(name, config),
        config=MappingProxyType({**config, "architectures": [family.architecture]}),
    )
    if shape.heads % shape.kv_heads:
        raise UnsupportedModelError(f"{name}: {shape.heads} heads cannot share {shape.kv_heads} key heads")
    if shape.vocab < 256 + len(shape.specials) or max(shape.specials, default=0) >= shape.vocab:
        raise UnsupportedModelError(
            f"{name}: a vocabulary of {shape.vocab} cannot hold 256 bytes and the special tokens {list(shape.specials)}"
        )
    return shape


# Fields that say nothing of a model's shape.
_NEUTRAL = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "hidden_act_param", "initializer_range", "model_type"),
        *("pretraining_tp", "torch_dtype", "transformers_version", "use_cache"),
    }
)


def plain_shape(name: str, config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a `config.json` that has no fields but those of the named shapes of its family.

    None for any other: what its further fields change only transformers knows.
    """
    named = [shape.config for shape in SHAPES.values() if shape.config.get("model_type") == config.get("model_type")]
    given = {key for key, value in config.items() if value is not None}
    if not named or not given <= _NEUTRAL.union(*named):
        return None
    try:
        return _read_shape(name, config, _family(name, config), activation_text(config, known_family(config), ""))
    except (UsageError, UnsupportedModelError):
        return None


def _family(name: str, config: Mapping[str, Any]) -> SynthFamily:
    family = find_family(config)
    if family is None:
        found, known = config.get("model_type"), ", ".join(FAMILIES)
        raise UnsupportedModelError(f"{name}: synth does not make model_type {found!r}; it makes {known}")
    required = {**family.required, "word_embed_proj_dim": config.get("hidden_size")}
    for key, value in required.items():
        if config.get(key, value) != value:
            raise UnsupportedModelError(f"{name}: synth needs {key} = {value}, not {config[key]!r}")
    return family


@dataclass(frozen=True)
class _Reader:
    name: str
    config: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise UsageError(f"{self.name}: {key} must be a whole number from 1 to {_LARGEST}, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UsageError(f"{self.name}: {key} must be a number above 0, not {value!r}")
        return float(value)


def _kv_heads(read: _Reader, family: SynthFamily, heads: int) -> int:
    if family.attention == "fused" and not read.config.get("new_decoder_architecture", False):
        return 1 if read.config.get("multi_query", True) else heads
    return read.count(family.fields["kv_heads"], heads)


def _activation(name: str, config: Mapping[str, Any], family: SynthFamily) -> str:
    text = config.get(family.fields["activation"], "")
    if text == "fatrelu":
        # ProSparse writes the threshold beside the name (arXiv 2402.13516).
        return f"fatrelu({_Reader(name, config).number('hidden_act_param', 0.01)!r})"
    known = [name for name, activation in ACTIVATIONS.items() if activation.sparse]
    if text not in known:
        sparse = ", ".join(known)
        raise UnsupportedModelError(f"{name}: {text!r} leaves no neuron silent; synth needs one of {sparse}, fatrelu")
    return str(text)


def special_tokens(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that a config.json says stand for no text. Raise `UsageError` for wrong ones."""
    found: list[int] = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is None or token == -1:
                continue
            if not isinstance(token, int) or token < 0:
                raise UsageError(f"{name}: {key} must be a token id, not {token!r}")
            if token not in found:
                found.append(token)
    return tuple(found)


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of the checkpoint, in the order in which they are made."""
    names = shape.family.names
    yield f"{names['embedding']}.weight", (shape.vocab, shape.hidden)
    if "positions" in names:
        yield f"{names['positions']}.weight", (shape.positions + POSITION_OFFSET, shape.hidden)
    for layer in range(shape.layers):
        yield from _layer_tensors(shape, layer)
    yield from _norm_tensors(shape, names["final_norm"])
    if not shape.tied:
        yield f"{names['head']}.weight", (shape.vocab, shape.hidden)


def _layer_tensors(shape: ModelShape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears = {
        "qkv": (queries + 2 * keys, shape.hidden, shape.query_bias),
        "q": (queries, shape.hidden, shape.query_bias),
        "k": (keys, shape.hidden, shape.query_bias),
        "v": (keys, shape.hidden, shape.query_bias),
        "o": (shape.hidden, queries, shape.output_bias),
        "gate": (shape.ffn, shape.hidden, shape.ffn_bias),
        "up": (shape.ffn, shape.hidden, shape.ffn_bias),
        "down": (shape.hidden, shape.ffn, shape.ffn_bias),
    }
    for role, template in shape.family.names.items():
        if "{}" not in template:
            continue
        name = template.format(layer)
        if role in linears:
            rows, columns, bias = linears[role]
            yield f"{name}.weight", (rows, columns)
            if bias:
                yield f"{name}.bias", (rows,)
        else:
            yield from _norm_tensors(shape, name)


def _norm_tensors(shape: ModelShape, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (shape.hidden,)
    if shape.family.norm == "layer":
        yield f"{name}.bias", (shape.hidden,)


# The named shapes: each is a configuration like any other, so that one reader serves these and files.


def _llama(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "relu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _opt(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "activation_function": "relu",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        **more,
    }


def _falcon(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon",
        "activation": "relu",
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
        **more,
    }


# Bamboo and TurboSparse (arXiv 2406.05955): Mistral's shape with ReLU on gate and on up.
_DRELU = {"model_type": "bamboo", "sliding_window": None, "max_position_embeddings": 4096}

# Falcon-40B's form of the block: grouped key heads, and a norm for each half.
_FALCON_NEW = {"new_decoder_architecture": True, "num_kv_heads": 8}

SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        name: shape_from_config(name, config)
        for name, config in {
            "reglu-1.3b": _llama(2048, 5632, 24, 32),
            "opt-1.3b": _opt(2048, 8192, 24, 32),
            "llama-7b": _llama(4096, 11008, 32, 32),
            "bamboo-7b": _llama(4096, 14336, 32, 32, num_key_value_heads=8, **_DRELU),
            "falcon-7b": _falcon(4544, 32, 71),
            "llama-13b": _llama(5120, 13824, 40, 40),
            "llama-70b": _llama(8192, 28672, 80, 64, num_key_value_heads=8),
            "opt-6.7b": _opt(4096, 16384, 32, 32),
            "opt-13b": _opt(5120, 20480, 40, 40),
            "opt-30b": _opt(7168, 28672, 48, 56),
            "opt-66b": _opt(9216, 36864, 64, 72),
            "opt-175b": _opt(12288, 49152, 96, 96),
            "falcon-40b": _falcon(8192, 60, 128, **_FALCON_NEW),
            "tiny-reglu": _llama(96, 200, 2, 4, num_key_value_heads=2, vocab_size=512),
            "tiny-opt": _opt(96, 208, 2, 4, vocab_size=512),
            "tiny-drelu": _llama(128, 200, 3, 4, num_key_value_heads=1, vocab_size=512, **_DRELU),
            "tiny-falcon": _falcon(96, 2, 4, ffn_hidden_size=216, vocab_size=512),
        }.items()
    }
)


def find_shape(text: str) -> ModelShape:
    """Return the shape that `text` names: an entry of `SHAPES`, or a JSON file with the fields of a `config.json`.

    Names may be in any case, and with spaces. Raises `UsageError` when there is neither, or the file cannot be read.
    """
    return SHAPES[text] if text in SHAPES else shape_from_config(*find_config(text))


def shape_names() -> tuple[str, ...]:
    """Return the names of all shapes, those that synth cannot make among them."""
    return (*SHAPES, *MIXTURES, *DENSE)


def find_config(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the fields of the `config.json` that `text` names, as `find_shape` does.

    What synth cannot make is found as well. Raises as `find_shape` does.
    """
    known, path = shape_names(), Path(text)
    name = text if text in known or path.is_file() else find_name(text, known)
    if name is None:
        near = did_you_mean(text, known)
        ways = f"{near} " if near else ""
        raise UsageError(
            f"unknown shape {shortened(repr(text))}; {ways}docs/cli.md, plan, lists the names; a file with the fields "
            "of a config.json is a shape, too"
        )
    if name in SHAPES:
        return name, SHAPES[name].config
    for others in (MIXTURES, DENSE):
        if name in others:
            return name, others[name]
    try:
        return folder_name(path.parent) if path.name == CONFIG else path.stem, read_json_object(path)
    except UnsupportedModelError as error:
        raise UsageError(f"{error}; it must have the fields of a config.json") from error
