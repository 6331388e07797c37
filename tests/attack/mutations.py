"""Ways to damage a Hugging Face folder, as data: a function changes the folder in place, by a random generator."""

import json
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[random.Random, Path], None]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MEGABYTES = 100

# What is never right in place of a number or a text, and what is right in some places.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 1_000_000, 2**31, 2**70, 10**400, 0.5, 2.0, -0.5, 1e300, 1e-300),
    *(math.nan, math.inf, -math.inf, "", "x", "7", "relu", "a\nb", "\x1b[2J", "\ud800", [], [1], [[]], ["x", 3], {}),
    *({"layer": 0}, [0] * 1000, "y" * 5000, {"rope_type": "linear", "factor": math.nan}),
)
_OTHER_KEYS = (
    *("rope_theta", "rope_scaling", "layer_types", "sliding_window", "head_dim", "is_causal", "per_layer_config"),
    *("quantization_config", "hidden_act_param", "num_labels", "dtype", "to_dict", "__class__", "configuration_files"),
    *("auto_map", "tie_word_embeddings", "attention_bias", "pruned_heads", "attn_implementation", "id2label"),
)


def mutate(folder: Path, seed: int) -> str:
    """Damages a copy of a good checkpoint; the name of what was done."""
    draw = random.Random(seed)
    kinds = INDEX_MUTATIONS if (folder / INDEX).is_file() else WEIGHT_MUTATIONS
    mutation = draw.choice(draw.choice((CONFIG_MUTATIONS, CONFIG_MUTATIONS, kinds, kinds, TOKENIZER_MUTATIONS)))
    mutation(draw, folder)
    return mutation.__name__


# ------------------------------------------------------------------------------------------------------------ files


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _remove(path: Path) -> None:
    path.unlink()


def _flip(draw: random.Random, path: Path, start: int = 0, end: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 20))):
        data[draw.randrange(start, end or len(data))] = draw.randrange(256)
    path.write_bytes(data)


def _truncate(draw: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def _nested(path: Path) -> None:
    _write(path, '{"a":' * 100_000 + "1" + "}" * 100_000)


def _long(path: Path) -> None:
    """A valid description, behind a hundred megabytes."""
    text = path.read_bytes().rstrip().removesuffix(b"}")
    path.write_bytes(text + b', "filler": "' + b"x" * (_MEGABYTES << 20) + b'"}')


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _pipe(path: Path) -> None:
    """Whoever opens it would wait for ever."""
    path.unlink()
    os.mkfifo(path)


def _spoil(draw: random.Random, path: Path) -> None:
    """Damage a file in one of the ways that fit any file."""
    ways: tuple[Callable[[], None], ...] = (
        lambda: _truncate(draw, path),
        lambda: _flip(draw, path),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
        lambda: path.write_bytes(path.read_bytes().replace(b'"', b'"\xc3', 3)),
        lambda: _write(path, "[1, 2]"),
        lambda: _write(path, "null"),
        lambda: _nested(path),
        lambda: _long(path),
        lambda: _folder(path),
        lambda: _loop(path),
        lambda: _pipe(path),
        lambda: _remove(path),
        lambda: path.chmod(0),
    )
    draw.choice(ways)()


# ------------------------------------------------------------------------------------------------------- config.json


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def _configure(folder: Path, content: Any) -> None:
    _write(folder / "config.json", json.dumps(content))


def config_file(draw: random.Random, folder: Path) -> None:
    _spoil(draw, folder / "config.json")


def config_value(draw: random.Random, folder: Path) -> None:
    config = _config(folder)
    config[draw.choice((*config, *_OTHER_KEYS))] = draw.choice(STRANGE)
    _configure(folder, config)


def config_number(draw: random.Random, folder: Path) -> None:
    """A number in place of one of those that say how large the model is."""
    config = _config(folder)
    key = draw.choice([key for key, value in config.items() if type(value) is int])
    config[key] = draw.choice((config[key] + 1, config[key] * 2, config[key] - 1, 10**6, 10**9, -5, float(config[key])))
    _configure(folder, config)


def config_rope(draw: random.Random, folder: Path) -> None:
    rope = {"rope_type": draw.choice(("linear", "llama3", "yarn", "default", "dynamic", "x")), "rope_theta": 1e4}
    rope |= {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope[draw.choice((*rope, "attention_factor", "beta_fast", "partial_rotary_factor"))] = draw.choice(STRANGE)
    _configure(folder, _config(folder) | {"rope_parameters": rope})


def config_without_a_key(draw: random.Random, folder: Path) -> None:
    config = _config(folder)
    del config[draw.choice(sorted(config))]
    _configure(folder, config)


def config_key_twice(draw: random.Random, folder: Path) -> None:
    config = _config(folder)
    key = draw.choice(sorted(config))
    text = json.dumps(config)
    _write(folder / "config.json", f"{text[:-1]}, {json.dumps(key)}: {json.dumps(draw.choice(STRANGE))}}}")


def config_of_another_model(draw: random.Random, folder: Path) -> None:
    types = ("gemma", "granite", "mistral", "qwen2", "llama_sparse_relu", "sparsellama", "mamba", "bamboo", "", "x")
    classes = ("LlamaForCausalLM", "SparseLlamaForCausalLM", "MistralForCausalLM", "BambooForCausalLM", "LlamaModel")
    change = {"model_type": draw.choice(types), "architectures": [draw.choice(classes)]}
    change["hidden_act"] = draw.choice(("relu", "silu", "fatrelu", "gelu"))
    _configure(folder, _config(folder) | change)


def config_fatrelu(draw: random.Random, folder: Path) -> None:
    _configure(folder, _config(folder) | {"hidden_act": "fatrelu", "hidden_act_param": draw.choice(STRANGE)})


def config_of_many_keys(draw: random.Random, folder: Path) -> None:
    _configure(folder, _config(folder) | {f"key_{number}": draw.random() for number in range(100_000)})


def config_of_a_million_layers(draw: random.Random, folder: Path) -> None:
    _configure(folder, _config(folder) | {"num_hidden_layers": draw.choice((9_999, 10_000, 10**6, 2**31, 2**63))})


CONFIG_MUTATIONS: tuple[Mutation, ...] = (
    *(config_file, config_value, config_value, config_value, config_number, config_number, config_rope),
    *(config_without_a_key, config_key_twice, config_of_another_model, config_fatrelu, config_of_many_keys),
    config_of_a_million_layers,
)


# ------------------------------------------------------------------------------------------------------- safetensors


def _parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _join(path: Path, header: Any, data: bytes, text: str | None = None) -> None:
    encoded = (json.dumps(header) if text is None else text).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def _weights(draw: random.Random, folder: Path) -> Path:
    return draw.choice(sorted(folder.glob("*.safetensors")))


def _entry(draw: random.Random, header: dict[str, Any]) -> str:
    return draw.choice(sorted(name for name in header if name != "__metadata__"))


def weights_file(draw: random.Random, folder: Path) -> None:
    _spoil(draw, _weights(draw, folder))


def header_length(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    wrong = draw.choice((0, 1, length - 1, length + 1, len(data), len(data) - 8, 2**31, 2**63, 2**64 - 1, 10**8))
    path.write_bytes(struct.pack("<Q", wrong) + data[8:])


def header_bytes(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    _flip(draw, path, 8, 8 + length)


def header_field(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    entry = header[_entry(draw, header)]
    key = draw.choice(("dtype", "shape", "data_offsets"))
    dtypes = ("F64", "I8", "BOOL", "F8_E4M3", "F4", "X", "bf16", "", "BF16", "F16", "F32", "C64")
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    choices: dict[str, tuple[Any, ...]] = {
        "dtype": (*dtypes, None, 3, []),
        "shape": ([], [-1], [2**40, 2**40], [1, *shape], [*shape, 1], shape[::-1], [0], [1.5], ["x"], None, [2**64]),
        "data_offsets": ([end, start], [start, end + 4], [start + 4, end + 4], [0, 0], [-1, 3], [0], [0, 2**63], None),
    }
    entry[key] = draw.choice(choices[key])
    _join(path, header, data)


def header_name(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    entry = header.pop(_entry(draw, header))
    header[draw.choice(("", "x", "a\nb", "\x1b[2J", "model.layers.99.mlp.up_proj.weight", "n" * 10_000))] = entry
    _join(path, header, data)


def header_name_twice(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    first, second = _entry(draw, header), _entry(draw, header)
    text = json.dumps(header)
    _join(path, header, data, f"{text[:-1]}, {json.dumps(first)}: {json.dumps(header[second])}}}")


def header_without_a_tensor(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    del header[_entry(draw, header)]
    _join(path, header, data)


def header_with_another_tensor(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    names = ("model.layers.0.self_attn.q_norm.weight", "model.layers.7.mlp.up_proj.weight", "lm_head.bias", "x")
    extra = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
    _join(path, header | {draw.choice(names): extra}, data + bytes(16))


def header_of_many_tensors(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    many = {f"model.layers.{number}.mlp.up_proj.weight": empty for number in range(10, 200_000)}
    _join(path, header | many, data)


def header_metadata(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    header, data = _parts(path)
    _join(path, header | {"__metadata__": draw.choice(STRANGE)}, data)


def data_appended(draw: random.Random, folder: Path) -> None:
    path = _weights(draw, folder)
    path.write_bytes(path.read_bytes() + bytes(draw.choice((1, 8, 4096))))


def data_of_a_terabyte(draw: random.Random, folder: Path) -> None:
    """A file with a hole, which takes no space."""
    with _weights(draw, folder).open("r+b") as file:
        file.truncate(1 << 40)


def data_no_number(draw: random.Random, folder: Path) -> None:
    """NaN, an infinity, or more than a half can hold, in one weight."""
    path = _weights(draw, folder)
    header, data = _parts(path)
    entry = header[_entry(draw, header)]
    start, end = entry["data_offsets"]
    place = start + 4 * draw.randrange((end - start) // 4)
    value = draw.choice((math.nan, math.inf, -math.inf, 1e38 if len(entry["shape"]) > 1 else math.nan))
    _join(path, header, data[:place] + struct.pack("<f", value) + data[place + 4 :])


WEIGHT_MUTATIONS: tuple[Mutation, ...] = (
    *(weights_file, header_length, header_bytes, header_field, header_field, header_field, header_name),
    *(header_name_twice, header_without_a_tensor, header_with_another_tensor, header_of_many_tensors),
    *(header_metadata, data_appended, data_of_a_terabyte, data_no_number),
)


# ------------------------------------------------------------------------------------------------------------- index


def index_file(draw: random.Random, folder: Path) -> None:
    _spoil(draw, folder / INDEX)


def index_entry(draw: random.Random, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    names = sorted({*index["weight_map"].values()})
    strange = ("/etc/passwd", "../model.safetensors", "..", ".", "", "none.safetensors", "a\0b", "\ud800", "x" * 5000)
    index["weight_map"][draw.choice(sorted(index["weight_map"]))] = draw.choice((*strange, *names, None, 3, [], {}))
    _write(folder / INDEX, json.dumps(index))


def index_value(draw: random.Random, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index[draw.choice(("weight_map", "weight_map", "metadata"))] = draw.choice(STRANGE)
    _write(folder / INDEX, json.dumps(index))


def index_without_an_entry(draw: random.Random, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][draw.choice(sorted(index["weight_map"]))]
    _write(folder / INDEX, json.dumps(index))


def index_key_twice(draw: random.Random, folder: Path) -> None:
    text = (folder / INDEX).read_text().rstrip().removesuffix("}")
    _write(folder / INDEX, f'{text}, "weight_map": {{}}}}')


def shard_twice(draw: random.Random, folder: Path) -> None:
    """A shard in place of another: the index and the files say different things."""
    first, second = draw.sample(sorted(folder.glob("*.safetensors")), 2)
    second.write_bytes(first.read_bytes())


def single_file_beside_the_index(draw: random.Random, folder: Path) -> None:
    (folder / SINGLE).write_bytes(_weights(draw, folder).read_bytes())


INDEX_MUTATIONS: tuple[Mutation, ...] = (
    *(index_file, index_file, index_entry, index_entry, index_value, index_without_an_entry, index_key_twice),
    *(shard_twice, single_file_beside_the_index, weights_file, header_field, header_bytes, data_no_number),
)


# --------------------------------------------------------------------------------------------------- tokenizer files


def tokenizer_file(draw: random.Random, folder: Path) -> None:
    _spoil(draw, folder / draw.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json")))


def tokenizer_value(draw: random.Random, folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content[draw.choice(sorted(content))] = draw.choice(STRANGE)
    _write(path, json.dumps(content))


def end_of_sequence(draw: random.Random, folder: Path) -> None:
    name, value = draw.choice(("config.json", "generation_config.json")), draw.choice((*STRANGE, "2", [-1], [1.0]))
    content = json.loads((folder / name).read_text()) | {draw.choice(("eos_token_id", "bos_token_id")): value}
    _write(folder / name, json.dumps(content))


TOKENIZER_MUTATIONS: tuple[Mutation, ...] = (tokenizer_file, tokenizer_file, tokenizer_value, end_of_sequence)
