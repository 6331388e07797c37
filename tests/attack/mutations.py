"""Ways to damage a Hugging Face folder: each function changes it in place, by a random generator."""

import json
import math
import os
import struct
import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import damage
from helpers.attacks import damage_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

STRANGE: tuple[Any, ...] = (
    *(*damage.STRANGE, False, 2, 3, 1_000_000, 2**31, 2.0, 1e-300, "relu", [0] * 1000, "y" * 5000),
    {"rope_type": "linear", "factor": math.nan},
)
_OTHER_KEYS = (
    *("rope_theta", "rope_scaling", "layer_types", "sliding_window", "head_dim", "is_causal", "per_layer_config"),
    *("quantization_config", "hidden_act_param", "num_labels", "dtype", "to_dict", "__class__", "configuration_files"),
    *("auto_map", "tie_word_embeddings", "attention_bias", "pruned_heads", "attn_implementation", "id2label"),
)
_TYPES = ("gemma", "granite", "mistral", "qwen2", "llama_sparse_relu", "sparsellama", "mamba", "bamboo", "", "x")
_CLASSES = ("LlamaForCausalLM", "SparseLlamaForCausalLM", "MistralForCausalLM", "BambooForCausalLM", "LlamaModel")


def mutate(folder: Path, seed: int) -> str:
    """Damage a copy of a good checkpoint; return the name of what was done."""
    draw = Random(seed)
    mutations = [any_file, any_file, any_value, any_value, config_field, config_field, key_twice]
    mutations += [header, header, header_bytes, data, *[index] * 3 * (folder / INDEX).is_file()]
    mutation = draw.choice(mutations)
    mutation(draw, folder)
    return mutation.__name__


def any_file(draw: Random, folder: Path) -> None:
    """One of the ways that fit any file."""
    path = draw.choice(sorted(folder.iterdir()))
    content, kind = path.read_bytes(), draw.choice((*["bytes"] * 6, "text", "text", "loop", "pipe", "rights"))
    if kind == "bytes":
        damage_file(path, sorted(folder.iterdir()), draw)
    elif kind == "text":
        deep, more = b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b', "filler": "' + b"x" * (100 << 20) + b'"}'
        texts = (b"\xff\xfe" + content, content.replace(b'"', b'"\xc3', 3), b"[1, 2]", b"null", deep)
        path.write_bytes(draw.choice((*texts, content.rstrip().removesuffix(b"}") + more)))
    elif kind == "rights":
        path.chmod(0)
    else:
        path.unlink()
        # Whoever opened the pipe would wait for ever.
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(path.name)


def any_value(draw: Random, folder: Path) -> None:
    """A strange value, or none, anywhere in a file of JSON."""
    path = draw.choice(sorted(folder.glob("*.json")))
    path.write_text(json.dumps(damage.spoiled(json.loads(path.read_text()), draw)[0]))


def config_field(draw: Random, folder: Path) -> None:
    """A field that another model has, or another value of one that says how large this one is."""
    path, strange = folder / "config.json", draw.choice(STRANGE)
    config = json.loads(path.read_text())
    size = draw.choice([key for key, value in config.items() if type(value) is int])
    now = config[size]
    rope = {"rope_type": draw.choice(("linear", "llama3", "yarn", "default", "dynamic", "x")), "rope_theta": 1e4}
    rope |= {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope[draw.choice((*rope, "attention_factor", "beta_fast", "partial_rotary_factor"))] = strange
    activation = draw.choice(("relu", "silu", "fatrelu", "gelu"))
    config |= draw.choice(
        (
            *[{draw.choice((*config, *_OTHER_KEYS)): strange}] * 3,
            *[{size: draw.choice((now + 1, now * 2, now - 1, 10**6, 10**9, -5, float(now)))}] * 2,
            {"rope_parameters": rope},
            {"model_type": draw.choice(_TYPES), "architectures": [draw.choice(_CLASSES)], "hidden_act": activation},
            {"hidden_act": "fatrelu", "hidden_act_param": strange},
            {f"key_{number}": number / 7 for number in range(100_000)},
            {"num_hidden_layers": draw.choice((9_999, 10_000, 10**6, 2**31, 2**63))},
            {draw.choice(("eos_token_id", "bos_token_id")): draw.choice((strange, "2", [-1], [1.0]))},
        )
    )
    path.write_text(json.dumps(config))


def key_twice(draw: Random, folder: Path) -> None:
    path = draw.choice(sorted(folder.glob("*.json")))
    content = json.loads(path.read_text())
    key, value = json.dumps(draw.choice(sorted(content))), json.dumps(draw.choice(STRANGE))
    path.write_text(f"{json.dumps(content)[:-1]}, {key}: {value}}}")


def _weights(draw: Random, folder: Path) -> Path:
    return draw.choice(sorted(folder.glob("*.safetensors")))


def header(draw: Random, folder: Path) -> None:
    path = _weights(draw, folder)
    tensors, values = damage.read_tensors(path)
    damage.damage_header(tensors, values, draw)
    path.write_bytes(damage.tensors_as_bytes(tensors, values))


def header_bytes(draw: Random, folder: Path) -> None:
    """Another length or other bytes, a name that is there twice, or more tensors than any model has."""
    path, kind = _weights(draw, folder), draw.choice(("length", "bytes", "twice", "many"))
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    text, values = bytearray(content[8 : 8 + size]), content[8 + size :]
    tensors = json.loads(text)
    if kind == "bytes":
        for _ in range(draw.choice((1, 1, 3, 20))):
            text[draw.randrange(size)] = draw.randrange(256)
    elif kind != "length":
        names, empty = sorted(tensors), {"dtype": "F32", "shape": [0], "data_offsets": [len(values), len(values)]}
        more = {f"model.layers.{number}.mlp.up_proj.weight": empty for number in range(10, 200_000)}
        more = {draw.choice(names): tensors[draw.choice(names)]} if kind == "twice" else more
        text[text.rindex(b"}") :] = f", {json.dumps(more)[1:]}".encode()
    wrong = (0, 1, size - 1, size + 1, len(content), len(content) - 8, 2**31, 2**63, 2**64 - 1, 10**8)
    size = draw.choice(wrong) if kind == "length" else len(text)
    path.write_bytes(struct.pack("<Q", size) + text + values)


def data(draw: Random, folder: Path) -> None:
    """NaN, an infinity, or more than a half can hold, in one weight; or a terabyte, which is a hole in the file."""
    path = _weights(draw, folder)
    if draw.random() < 0.2:
        os.truncate(path, 1 << 40)
        return
    tensors, values = damage.read_tensors(path)
    entry = tensors[draw.choice(sorted(tensors.keys() - {"__metadata__"}))]
    start, end = entry["data_offsets"]
    value = draw.choice((math.nan, math.inf, -math.inf, 1e38 if len(entry["shape"]) > 1 else math.nan))
    struct.pack_into("<f", values, start + 4 * draw.randrange((end - start) // 4), value)
    path.write_bytes(damage.tensors_as_bytes(tensors, values))


def index(draw: Random, folder: Path) -> None:
    """The index and the files say different things."""
    shards, kind = sorted(folder.glob("*.safetensors")), draw.choice(("entry", "entry", "twice", "single file"))
    if kind == "entry":
        content = json.loads((folder / INDEX).read_text())
        strange = ("/etc/passwd", "../model.safetensors", "..", ".", "", "none.safetensors", "a\0b", "\ud800")
        others = (*strange, "x" * 5000, *(path.name for path in shards), None, 3, [], {})
        content["weight_map"][draw.choice(sorted(content["weight_map"]))] = draw.choice(others)
        (folder / INDEX).write_text(json.dumps(content))
    else:
        source, target = draw.sample(shards, 2)
        (target if kind == "twice" else folder / SINGLE).write_bytes(source.read_bytes())
