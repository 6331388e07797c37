"""Files as PowerInfer writes them, with random predictors, and what can be done to them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float32]
Predictor = tuple[Array, Array]

TYPES = ("F32", "F16", "Q4_0", "Q8_0")
_HUGE = (2**31, 2**32, 2**62, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its predictors: D, F, number of layers, and a rank a layer."""

    hidden: int
    neurons: int
    ranks: Sequence[int]


def random_predictors(sizes: Sizes, seed: int) -> list[Predictor]:
    """fc1 [r, D] and fc2 [F, r] of each layer, in float32, from values that f16 has."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return draw.standard_normal((rows, columns)).astype(np.float16).astype(np.float32)

    return [(matrix(rank, sizes.hidden), matrix(sizes.neurons, rank)) for rank in sizes.ranks]


def write_gguf(
    file: Path,
    predictors: Sequence[Predictor],
    type_name: str = "F16",
    threshold: float | None = None,
    extra: Mapping[str, Sequence[object]] | None = None,
) -> None:
    """A PowerInfer GGUF: metadata, some of the model's own tensors, and the predictors in `type_name`."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(file, "llama")
    writer.add_name("Llama")
    writer.add_block_count(len(predictors))
    writer.add_token_list([f"token {number}" for number in range(40)])
    writer.add_token_scores([0.5] * 40)
    if threshold is not None:
        writer.add_float32("powerinfer.sparse_threshold", threshold)
    for key, values in (extra or {}).items():
        writer.add_array(key, values)
    kind = GGMLQuantizationType[type_name]
    for layer, (fc1, fc2) in enumerate(predictors):
        for part, values in (("fc1", fc1), ("fc2", fc2)):
            name = f"blk.{layer}.{part}.weight"
            if type_name == "F32":
                writer.add_tensor(name, values)
            elif type_name == "F16":
                writer.add_tensor(name, values.astype(np.float16))
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("token_embd.weight", np.ones((7, 5), np.float16))
    for layer in range(len(predictors)):
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.full(5, 0.25, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_down_t.weight", np.full((3, 5), 0.5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with file.open("r+b") as opened:
        opened.write(b"PWRI")


def write_folder(folder: Path, predictors: Sequence[Predictor], threshold: float | None = None) -> None:
    """The layout of ReluLLaMA-7B-Predictor: `model_N.pt`, and `config.json` where there is a threshold."""
    import torch

    folder.mkdir(exist_ok=True)
    for layer, matrices in enumerate(predictors):
        state = {f"{part}.weight": torch.from_numpy(m) for part, m in zip(("fc1", "fc2"), matrices, strict=True)}
        torch.save(state, folder / f"model_{layer}.pt")
    if threshold is not None:
        (folder / "config.json").write_text(json.dumps({"sparse_threshold": threshold}))


def write_activations(folder: Path, counts: "Sequence[Tensor]") -> None:
    """`activation_N.pt`: one number a neuron."""
    import torch

    folder.mkdir(exist_ok=True)
    for layer, values in enumerate(counts):
        torch.save(values.clone(), folder / f"activation_{layer}.pt")


def stored(values: Array, type_name: str) -> Array:
    """`values` as a file of `type_name` has them, rounded to f16."""
    from gguf import GGMLQuantizationType, dequantize, quantize

    if type_name not in ("F32", "F16"):
        kind = GGMLQuantizationType[type_name]
        values = dequantize(quantize(values, kind), kind)
    return values.astype(np.float16).astype(np.float32)


def reference_mask(x: Array, predictor: Predictor, threshold: float) -> npt.NDArray[np.bool_]:
    """ggml's: a neuron is left out if its logit is below the threshold. x [T, D] → bool [T, F]."""
    fc1, fc2 = predictor
    return np.maximum(x @ fc1.T, 0) @ fc2.T >= np.float32(threshold)


@dataclass(frozen=True)
class Mutation:
    """A changed file. `harmless`: of its header only what nobody reads has changed, if it is accepted at all."""

    name: str
    data: bytes
    harmless: bool = True


@dataclass(frozen=True)
class _Places:
    """Where the fields of a header are, in bytes from the start of the file."""

    values: Mapping[str, int]
    tensors: Mapping[str, tuple[int, int, int, int, int]]
    end: int


def mutations(file: Path, count: int, seed: int) -> list[Mutation]:
    """`count` changed copies of the PowerInfer GGUF `file`: half forged, a fifth cut, the rest with one bit flipped.

    The larger `count`, the more of the forged numbers are among them; 400 has them all.
    """
    data, places = file.read_bytes(), _places(file)
    draw = np.random.default_rng(seed)
    found = list(_rewritten(data, places))
    forged = [mutation for mutation in _forged(data, places) if mutation.data != data]
    found += [forged[index] for index in draw.permutation(len(forged))[: max(0, count // 2 - len(found))]]
    cuts = {0, 1, 3, 4, 8, 23, 24, 25, places.end - 1, places.end, len(data) - 1}
    while len(cuts) < count // 5:
        cuts.add(int(draw.integers(0, len(data))))
    found += [Mutation(f"cut to {size} bytes", data[:size]) for size in sorted(cuts)]
    while len(found) < count:
        in_header = bool(draw.random() < 0.9)
        byte = int(draw.integers(0, places.end) if in_header else draw.integers(places.end, len(data)))
        bit = int(draw.integers(8))
        flipped = bytearray(data)
        flipped[byte] ^= 1 << bit
        found.append(Mutation(f"bit {bit} of byte {byte} flipped", bytes(flipped), harmless=in_header))
    return found


def _places(file: Path) -> _Places:
    from gguf import GGUFReader, gguf_reader

    copy = file.with_suffix(".plain")
    copy.write_bytes(gguf_reader.GGUF_MAGIC.to_bytes(4, "little") + file.read_bytes()[4:])
    reader = GGUFReader(copy)
    tensors = {}
    for tensor in reader.tensors:
        sizes = [int(part.nbytes) for part in tensor.field.parts]
        starts = [tensor.field.offset + sum(sizes[:index]) for index in range(len(sizes))]
        # length of the name, number of dimensions, dimensions, type, offset
        tensors[tensor.name] = (starts[0], starts[2], starts[3], starts[4], starts[5])
    values = {name: field.offset for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    copy.unlink()
    return _Places(values, tensors, reader.data_offset)


def _put(data: bytes, at: int, value: int, size: int = 8) -> bytes:
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


def _forged(data: bytes, places: _Places) -> Iterator[Mutation]:
    """Numbers of the header, each replaced by ones that are too large, too small, or next to it."""
    for version in (0, 1, 4, 3 << 24):
        yield Mutation(f"version {version}", _put(data, 4, version, 4))
    for what, at in (("tensors", 8), ("values", 16)):
        own = int.from_bytes(data[at : at + 8], "little")
        for value in (0, own - 1, own + 1, 65_536, *_HUGE):
            yield Mutation(f"{value} {what}", _put(data, at, value))
    for name in ("blk.0.fc1.weight", "blk.1.fc2.weight", "token_embd.weight"):
        length, count, sizes, kind, offset = places.tensors[name]
        for value in (0, 2**20, *_HUGE[2:]):
            yield Mutation(f"name of {name} is {value} bytes", _put(data, length, value))
        for value in (0, 1, 3, 5, 2**31):
            yield Mutation(f"{value} dimensions of {name}", _put(data, count, value, 4))
        for value in (0, 1, 64, *_HUGE[1:]):
            yield Mutation(f"{name} is {value} wide", _put(data, sizes, value))
        for value in (0, 4, 5, 8, 12, 18, 99):
            yield Mutation(f"{name} is of type {value}", _put(data, kind, value, 4))
        own = int.from_bytes(data[offset : offset + 8], "little")
        for value in (own + 1, own + 32, len(data), *_HUGE[3:]):
            yield Mutation(f"{name} lies at {value}", _put(data, offset, value))
    for key, at in places.values.items():
        for value in (2**20, 2**62, 2**64 - 1):
            yield Mutation(f"key {key} is {value} bytes", _put(data, at, value))
        for value in (9, 12, 13, 2**31):
            yield Mutation(f"{key} is of type {value}", _put(data, at + 8 + len(key), value, 4))
    at = places.values["tokenizer.ggml.tokens"] + 8 + len("tokenizer.ggml.tokens") + 4
    for value in (9, 0, 13, 2**31):
        yield Mutation(f"an array of type {value}", _put(data, at, value, 4))
    for value in (41, 10**6, *_HUGE):
        yield Mutation(f"an array of {value} elements", _put(data, at + 4, value))
    yield Mutation("a string without end", _put(data, at + 12, 2**40))


def _rewritten(data: bytes, places: _Places) -> Iterator[Mutation]:
    """Names given twice, arrays in arrays, other data behind the same header, and what follows after the end."""
    yield Mutation("the same tensor twice", data.replace(b"blk.1.fc1.weight", b"blk.0.fc1.weight"))
    yield Mutation("a layer too many", data.replace(b"blk.1.fc1.weight", b"blk.7.fc1.weight"))
    yield Mutation("the same key twice", data.replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"))
    at = places.values["general.name"]
    for depth in (1, 20_000):
        arrays = (9).to_bytes(4, "little") + ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * depth
        value = len("general.name").to_bytes(8, "little") + b"general.name" + arrays
        yield Mutation(f"arrays in arrays, {depth} deep", data[:at] + value + data[at:])
    for bits, name in ((0x7E00, "a NaN"), (0x7C00, "an infinity")):
        yield Mutation(name, _put(data, places.end + 10, bits, 2), harmless=False)
    yield Mutation("another file's start", b"PK\x03\x04" + data[4:])
    yield Mutation("a plain GGUF's start", b"GGUF" + data[4:])
    yield Mutation("more after its end", data + bytes(1000))
    yield Mutation("all ones", data[:24] + b"\xff" * (len(data) - 24))
