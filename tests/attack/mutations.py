"""Ways to damage a Hugging Face folder, as data: a function changes the folder in place, by a random generator."""

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import damage
from helpers.attacks import damage_file

Json = dict[str, Any]
Mutation = Callable[[Random, Path], None]

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


def mutate(folder: Path, seed: int) -> str:
    """Damage a copy of a good checkpoint; return the name of what was done."""
    draw = Random(seed)
    kinds = INDEX_MUTATIONS if (folder / INDEX).is_file() else WEIGHT_MUTATIONS
    mutation = draw.choice(draw.choice((CONFIG_MUTATIONS, CONFIG_MUTATIONS, kinds, kinds, TOKENIZER_MUTATIONS)))
    mutation(draw, folder)
    return mutation.__name__


# ------------------------------------------------------------------------------------------------------------ files


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _pipe(path: Path) -> None:
    """Whoever opens it would wait for ever."""
    path.unlink()
    os.mkfifo(path)


def _long(path: Path) -> None:
    """A valid description, behind a hundred megabytes."""
    text = path.read_bytes().rstrip().removesuffix(b"}")
    path.write_bytes(text + b', "filler": "' + b"x" * (100 << 20) + b'"}')


def _spoil(draw: Random, path: Path) -> None:
    """Damage a file in one of the ways that fit any file."""
    ways: tuple[Callable[[], object], ...] = (
        *[lambda: damage_file(path, sorted(path.parent.iterdir()), draw)] * 6,
        lambda: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
        lambda: path.write_bytes(path.read_bytes().replace(b'"', b'"\xc3', 3)),
        lambda: _write(path, "[1, 2]"),
        lambda: _write(path, "null"),
        lambda: _write(path, '{"a":' * 100_000 + "1" + "}" * 100_000),
        lambda: _long(path),
        lambda: _loop(path),
        lambda: _pipe(path),
        lambda: path.chmod(0),
    )
    draw.choice(ways)()


@contextmanager
def _json(path: Path) -> Iterator[Json]:
    """The content of a file, which is written back."""
    content = json.loads(path.read_text())
    yield content
    _write(path, json.dumps(content))


# ------------------------------------------------------------------------------------------------------- config.json


def _configure(folder: Path, **fields: Any) -> None:
    with _json(folder / "config.json") as config:
        config |= fields


def config_file(draw: Random, folder: Path) -> None:
    _spoil(draw, folder / "config.json")


def config_value(draw: Random, folder: Path) -> None:
    with _json(folder / "config.json") as config:
        config[draw.choice((*config, *_OTHER_KEYS))] = draw.choice(STRANGE)


def config_number(draw: Random, folder: Path) -> None:
    """A number in place of one of those that say how large the model is."""
    with _json(folder / "config.json") as config:
        key = draw.choice([key for key, value in config.items() if type(value) is int])
        now = config[key]
        config[key] = draw.choice((now + 1, now * 2, now - 1, 10**6, 10**9, -5, float(now)))


def config_rope(draw: Random, folder: Path) -> None:
    rope = {"rope_type": draw.choice(("linear", "llama3", "yarn", "default", "dynamic", "x")), "rope_theta": 1e4}
    rope |= {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope[draw.choice((*rope, "attention_factor", "beta_fast", "partial_rotary_factor"))] = draw.choice(STRANGE)
    _configure(folder, rope_parameters=rope)


def config_without_a_key(draw: Random, folder: Path) -> None:
    with _json(folder / "config.json") as config:
        del config[draw.choice(sorted(config))]


def config_key_twice(draw: Random, folder: Path) -> None:
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    key, value = draw.choice(sorted(json.loads(text + "}"))), draw.choice(STRANGE)
    _write(folder / "config.json", f"{text}, {json.dumps(key)}: {json.dumps(value)}}}")


def config_of_another_model(draw: Random, folder: Path) -> None:
    types = ("gemma", "granite", "mistral", "qwen2", "llama_sparse_relu", "sparsellama", "mamba", "bamboo", "", "x")
    classes = ("LlamaForCausalLM", "SparseLlamaForCausalLM", "MistralForCausalLM", "BambooForCausalLM", "LlamaModel")
    activation = draw.choice(("relu", "silu", "fatrelu", "gelu"))
    _configure(folder, model_type=draw.choice(types), architectures=[draw.choice(classes)], hidden_act=activation)


def config_fatrelu(draw: Random, folder: Path) -> None:
    _configure(folder, hidden_act="fatrelu", hidden_act_param=draw.choice(STRANGE))


def config_of_many_keys(draw: Random, folder: Path) -> None:
    _configure(folder, **{f"key_{number}": draw.random() for number in range(100_000)})


def config_of_a_million_layers(draw: Random, folder: Path) -> None:
    _configure(folder, num_hidden_layers=draw.choice((9_999, 10_000, 10**6, 2**31, 2**63)))


CONFIG_MUTATIONS: tuple[Mutation, ...] = (
    *(config_file, config_value, config_value, config_value, config_number, config_number, config_rope),
    *(config_without_a_key, config_key_twice, config_of_another_model, config_fatrelu, config_of_many_keys),
    config_of_a_million_layers,
)


# ------------------------------------------------------------------------------------------------------- safetensors


def _weights(draw: Random, folder: Path) -> Path:
    return draw.choice(sorted(folder.glob("*.safetensors")))


@contextmanager
def _tensors(draw: Random, folder: Path) -> Iterator[tuple[Json, bytearray, list[str]]]:
    """The header of a file, its data, and two names of tensors; header and data are written back."""
    path = _weights(draw, folder)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    names = draw.choices(sorted(name for name in header if name != "__metadata__"), k=2)
    yield header, data, names
    # Without its star, a key is there a second time.
    encoded = json.dumps(header).replace('*": ', '": ').encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def weights_file(draw: Random, folder: Path) -> None:
    _spoil(draw, _weights(draw, folder))


def header_length(draw: Random, folder: Path) -> None:
    path = _weights(draw, folder)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    wrong = draw.choice((0, 1, length - 1, length + 1, len(data), len(data) - 8, 2**31, 2**63, 2**64 - 1, 10**8))
    path.write_bytes(struct.pack("<Q", wrong) + data[8:])


def header_bytes(draw: Random, folder: Path) -> None:
    path = _weights(draw, folder)
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 20))):
        data[draw.randrange(8, 8 + struct.unpack("<Q", data[:8])[0])] = draw.randrange(256)
    path.write_bytes(data)


def header_field(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, _, (name, _)):
        dtypes = ("F64", "I8", "BOOL", "F8_E4M3", "F4", "X", "bf16", "", "BF16", "F16", "F32", "C64")
        shape, (start, end) = header[name]["shape"], header[name]["data_offsets"]
        shapes = ([], [-1], [2**40, 2**40], [1, *shape], [*shape, 1], shape[::-1], [0], [1.5], ["x"], None, [2**64])
        moved = ([end, start], [start, end + 4], [start + 4, end + 4], [0, 0], [-1, 3], [0], [0, 2**63], None)
        choices: dict[str, tuple[Any, ...]] = {
            "dtype": (*dtypes, None, 3, []), "shape": shapes, "data_offsets": moved
        }  # fmt: skip
        key = draw.choice(sorted(choices))
        header[name][key] = draw.choice(choices[key])


def header_name(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, _, (name, _)):
        odd = ("", "x", "a\nb", "\x1b[2J", "model.layers.99.mlp.up_proj.weight", "n" * 10_000)
        header[draw.choice(odd)] = header.pop(name)


def header_name_twice(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, _, (first, second)):
        header[f"{first}*"] = header[second]


def header_without_a_tensor(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, _, (name, _)):
        del header[name]


def header_with_another_tensor(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, data, _):
        names = ("model.layers.0.self_attn.q_norm.weight", "model.layers.7.mlp.up_proj.weight", "lm_head.bias", "x")
        header[draw.choice(names)] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
        data += bytes(16)


def header_of_many_tensors(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, data, _):
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
        header |= {f"model.layers.{number}.mlp.up_proj.weight": empty for number in range(10, 200_000)}


def header_metadata(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (header, _, _):
        header["__metadata__"] = draw.choice(STRANGE)


def data_appended(draw: Random, folder: Path) -> None:
    with _tensors(draw, folder) as (_, data, _):
        data += bytes(draw.choice((1, 8, 4096)))


def data_of_a_terabyte(draw: Random, folder: Path) -> None:
    """A file with a hole, which takes no space."""
    os.truncate(_weights(draw, folder), 1 << 40)


def data_no_number(draw: Random, folder: Path) -> None:
    """NaN, an infinity, or more than a half can hold, in one weight."""
    with _tensors(draw, folder) as (header, data, (name, _)):
        start, end = header[name]["data_offsets"]
        is_matrix = len(header[name]["shape"]) > 1
        value = draw.choice((math.nan, math.inf, -math.inf, 1e38 if is_matrix else math.nan))
        struct.pack_into("<f", data, start + 4 * draw.randrange((end - start) // 4), value)


WEIGHT_MUTATIONS: tuple[Mutation, ...] = (
    *(weights_file, header_length, header_bytes, header_field, header_field, header_field, header_name),
    *(header_name_twice, header_without_a_tensor, header_with_another_tensor, header_of_many_tensors),
    *(header_metadata, data_appended, data_of_a_terabyte, data_no_number),
)


# ------------------------------------------------------------------------------------------------------------- index


def index_file(draw: Random, folder: Path) -> None:
    _spoil(draw, folder / INDEX)


def index_entry(draw: Random, folder: Path) -> None:
    with _json(folder / INDEX) as index:
        weights = index["weight_map"]
        strange = ("/etc/passwd", "../model.safetensors", "..", ".", "", "none.safetensors", "a\0b", "\ud800")
        others = (*strange, "x" * 5000, *sorted({*weights.values()}), None, 3, [], {})
        weights[draw.choice(sorted(weights))] = draw.choice(others)


def index_value(draw: Random, folder: Path) -> None:
    with _json(folder / INDEX) as index:
        index[draw.choice(("weight_map", "weight_map", "metadata"))] = draw.choice(STRANGE)


def index_without_an_entry(draw: Random, folder: Path) -> None:
    with _json(folder / INDEX) as index:
        del index["weight_map"][draw.choice(sorted(index["weight_map"]))]


def index_key_twice(draw: Random, folder: Path) -> None:
    text = (folder / INDEX).read_text().rstrip().removesuffix("}")
    _write(folder / INDEX, f'{text}, "weight_map": {{}}}}')


def shard_twice(draw: Random, folder: Path) -> None:
    """A shard in place of another: the index and the files say different things."""
    first, second = draw.sample(sorted(folder.glob("*.safetensors")), 2)
    second.write_bytes(first.read_bytes())


def single_file_beside_the_index(draw: Random, folder: Path) -> None:
    (folder / SINGLE).write_bytes(_weights(draw, folder).read_bytes())


INDEX_MUTATIONS: tuple[Mutation, ...] = (
    *(index_file, index_file, index_entry, index_entry, index_value, index_without_an_entry, index_key_twice),
    *(shard_twice, single_file_beside_the_index, weights_file, header_field, header_bytes, data_no_number),
)


# --------------------------------------------------------------------------------------------------- tokenizer files


def tokenizer_file(draw: Random, folder: Path) -> None:
    _spoil(draw, folder / draw.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json")))


def tokenizer_value(draw: Random, folder: Path) -> None:
    with _json(folder / "tokenizer.json") as content:
        content[draw.choice(sorted(content))] = draw.choice(STRANGE)


def end_of_sequence(draw: Random, folder: Path) -> None:
    with _json(folder / draw.choice(("config.json", "generation_config.json"))) as content:
        content[draw.choice(("eos_token_id", "bos_token_id"))] = draw.choice((*STRANGE, "2", [-1], [1.0]))


TOKENIZER_MUTATIONS: tuple[Mutation, ...] = (tokenizer_file, tokenizer_file, tokenizer_value, end_of_sequence)
