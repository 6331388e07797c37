"""Makes artifacts and GGUF files of a pack whole: their weights, from a seed, and their entry in the manifest.

Nothing is trained, and the text means nothing. What fires is made so that a wanted share of the neurons is computed for
each token, other ones for another token:

- Embeddings are between 0.5 and 1.5, and what layers add to them is small, so that a block's input is mostly positive.
  The rows of gates are positive: every neuron that is computed fires, and its up and down rows are read.
- The rows of a predictor's first matrix add up to zero, so that only what tokens differ in reaches its hidden values;
  these and the rows of the second matrix are scaled so that logits are normal, with a deviation of about 1. The bias of
  a neuron is the quantile of its rate: it is computed for that share of the tokens.
- Hot neurons are the first of a layer. They have the share that a power law gives them in which 26 % of the neurons
  fire 80 % of the times, as PowerInfer's paper says of OPT-30B.

Which share was computed indeed is read from the engine's counters, and reported beside every speed.
"""

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.growth import Growth
from picompile_passes.dialect import quantize_rows
from picompile_runtime.artifact.manifest import WEIGHTS, sealed
from picompile_runtime.verified_files import mark_verified

Array = NDArray[Any]

# Different rows of a random matrix: so many elements. Drawing more takes minutes where a matrix has billions.
_BLOCK_ELEMENTS = 2**22
_PART_BYTES, _WRITERS, _ALIGNMENT, _GGUF_ALIGNMENT = 2**26, 8, 64, 32
_DTYPES = {"uint8": "U8", "float32": "F32"}
_VARIANTS = 3
# This is the deviation of whole numbers from -7 to 7, all equally likely.
_NIBBLE_DEVIATION = (sum(i * i for i in range(-7, 8)) / 15) ** 0.5
# Of all times that neurons fire, what the hottest 26 % of them have.
_POWER = math.log(0.80) / math.log(0.26)
# No neuron fires for more tokens than this.
_MOST = 0.95
# What a layer adds to the stream, whose elements are about 1. Neurons whose rows are the same add up, and so do layers
# of the same rows: with 0.02, 25 % of the neurons of a model of 70 billion parameters fire instead of 5 %. With this,
# 5.0 %, and 5.1 % of one of 7 billion, as a calculation with these weights in numpy has it.
ADDED = 5e-4
# The deviation of the elements of a normalized embedding that is uniform between 0.5 and 1.5.
_TOKEN_DEVIATION = (1 / 12) ** 0.5 / (13 / 12) ** 0.5


def write_artifact(archive: Path, folder: Path, active: float, added: float = ADDED) -> None:
    """Extracts a pack's zip file into `folder` and makes the weights, and their entry in the manifest.

    `active` is the share of neurons to compute, `added` the deviation of what attention or a block adds to the stream.
    Nothing is hashed: the entry has a random number, and a stamp says that the file was found whole.
    """
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    content, manifest = (json.loads((folder / name).read_text()) for name in ("weights.json", "manifest.json"))
    path, blocks, tensors = (
        folder / WEIGHTS,
        Blocks(Firing(active, manifest["model"]["ffn"], added)),
        content["tensors"],
    )
    size = _write(path, _header(tensors), tensors, blocks, (folder / "constants.bin").read_bytes())
    manifest["files"][WEIGHTS] = {"bytes": size, "sha256": os.urandom(32).hex()}
    text = sealed(manifest)
    (folder / "manifest.json").write_bytes(text)
    with path.open("rb") as file:
        mark_verified(path, file.fileno(), hashlib.sha256(text).hexdigest())


def write_gguf(archive: Path, output: Path) -> None:
    """Make the GGUF file of `pack_gguf`'s zip file; it appears whole or not at all."""
    with zipfile.ZipFile(archive) as opened:
        header, tensors = opened.read("header"), json.loads(opened.read("tensors.json"))
    unfinished = output.with_name(f"{output.name}.new")
    header = header.ljust(_aligned(len(header), _GGUF_ALIGNMENT), b"\0")
    _write(unfinished, header, tensors, Blocks(Firing(1.0, 0)), alignment=_GGUF_ALIGNMENT)
    unfinished.replace(output)


def _write(
    path: Path,
    header: bytes,
    tensors: Sequence[Mapping[str, Any]],
    blocks: "Blocks",
    constants: bytes = b"",
    alignment: int = 1,
) -> int:
    """The file's size. Several threads write: one alone gets 2 GB/s into memory, which takes as long as measuring.

    A file that is there is written over, so that its pages are used again.
    """
    growth, offset = Growth(), len(header)
    path.touch()
    with path.open("r+b") as file, ThreadPoolExecutor(_WRITERS) as pool:
        os.pwrite(file.fileno(), header, 0)
        for number, tensor in enumerate(tensors):
            size, data = _bytes(tensor), _content(tensor, constants, number, blocks)
            growth.before(size)
            parts = [(data[: size - start], offset + start) for start in range(0, size, max(1, len(data)))]
            written = sum(pool.map(lambda part: os.pwrite(file.fileno(), *part), parts))
            if written != size:
                raise OSError(f"{path}: {written} bytes of {size} were written; the disk is full")
            offset += _aligned(size, alignment)
        file.truncate(offset)
    return offset


def _header(tensors: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the header of a safetensors file, padded so that the data begins at a multiple of the alignment."""
    entries, offset = {}, 0
    for tensor in tensors:
        span = [offset, offset + _bytes(tensor)]
        entries[tensor["name"]] = {"dtype": _DTYPES[tensor["dtype"]], "shape": tensor["shape"], "data_offsets": span}
        offset = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = _aligned(8 + len(text), _ALIGNMENT) - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _bytes(tensor: Mapping[str, Any]) -> int:
    return int(math.prod(tensor["shape"]) * np.dtype(tensor["dtype"]).itemsize)


@dataclass(frozen=True)
class Firing:
    """The rates at which neurons are computed: a share `active` of all, for any token. Their sum is about `added`."""

    active: float
    neurons: int
    added: float = ADDED

    def rates(self, hot: int) -> tuple[float, float]:
        """For which share of the tokens a hot neuron is computed, and for which a cold one."""
        if not 0 < hot < self.neurons:
            return self.active, self.active
        share = hot / self.neurons
        of_hot = min(_MOST, self.active * share**_POWER / share)
        return of_hot, (self.active - share * of_hot) / (1 - share)

    def biases(self, hot: int) -> Array:
        """Return the logit to add to a normal one so that each neuron fires at its rate: float32 [neurons]."""
        rates = np.where(np.arange(self.neurons) < hot, *self.rates(hot))
        quantiles = {rate: NormalDist().inv_cdf(min(max(rate, 1e-9), 1 - 1e-9)) for rate in np.unique(rates)}
        return np.array([quantiles[rate] for rate in rates], np.float32)


class Blocks:
    """The random rows of matrices: `_VARIANTS` of each kind and shape, since drawing them takes longer than writing."""

    def __init__(self, firing: Firing) -> None:
        self.firing = firing
        self._made: dict[tuple[Any, ...], Array] = {}

    def of(self, tensor: Mapping[str, Any], number: int) -> Array:
        """The bytes of tensor `number`, or of so many of its first rows that all are these, again and again."""
        variant, role = number % _VARIANTS, tensor["role"]
        key = (role, tensor["format"], *tensor["shape"], tensor["columns"], variant)
        if key not in self._made:
            rng = np.random.default_rng([variant, list(_ROLES).index(role)])
            block = _ROLES[role](tensor, rng, self.firing).reshape(-1)
            self._made[key] = np.tile(block, min(-(-_bytes(tensor) // block.nbytes), 1 + _PART_BYTES // block.nbytes))
        return self._made[key]


def _content(tensor: Mapping[str, Any], constants: bytes, number: int, blocks: Blocks) -> memoryview:
    """Bytes that are to be written again and again until the tensor is full."""
    kind, count = tensor["kind"], math.prod(tensor["shape"])
    if kind == "constant":
        return memoryview(constants)[tensor["start"] : tensor["start"] + tensor["bytes"]]
    if kind == "matrix":
        return blocks.of(tensor, number).data
    values = np.full(count, kind == "ones", np.float32)
    if kind == "rates":
        values[: blocks.firing.neurons] = blocks.firing.biases(tensor["hot"])
    return values.data.cast("B")


def block_rows(rows: int, columns: int, parts: int = 1) -> int:
    """Return a random matrix's distinct rows: an odd number times `parts`, so that no power of two repeats them."""
    return min(rows, max(1, _BLOCK_ELEMENTS // columns // parts - 1 | 1) * parts)


def random_block(
    rng: np.random.Generator, form: str, rows: int, columns: int, deviations: tuple[float, ...] = (1.0,)
) -> NDArray[np.uint8]:
    """The rows that differ of a random packed matrix of so many rows, uint8 [block_rows(rows, …), row bytes].

    Row i is of normal numbers with a deviation of deviations[i % len] / sqrt(columns); a negative one stands for their
    absolute values.
    """
    count = block_rows(rows, columns, len(deviations))
    block = rng.standard_normal((count, columns), np.float32)
    for part, deviation in enumerate(deviations):
        of_part = block[part :: len(deviations)]
        of_part *= abs(deviation) / columns**0.5
        if deviation < 0:
            np.abs(of_part, out=of_part)
    return _pack(block, form)


def _pack(block: Array, form: str) -> NDArray[np.uint8]:
    packed: NDArray[np.uint8] = quantize_rows(torch.from_numpy(block), form).numpy()
    return packed


def _normal(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    deviation = firing.added if tensor["role"] == "output" else 1.0
    return random_block(rng, tensor["format"], tensor["shape"][0], tensor["columns"], (deviation,))


def _embedding(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    shape = block_rows(tensor["shape"][0], tensor["columns"]), tensor["columns"]
    return _pack(rng.uniform(0.5, 1.5, shape).astype(np.float32), tensor["format"])


def _bundle(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    """Gate, up and down of each neuron. A product with gate is about 1, and the sum of all that fire is small."""
    columns = tensor["columns"]
    down = firing.added * (columns / max(1.0, firing.active * firing.neurons)) ** 0.5
    deviations = (-1.25 / columns**0.5, 1.0, down)
    return random_block(rng, tensor["format"], tensor["shape"][0], columns, deviations)


def _first(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    rows, columns = tensor["shape"][0], tensor["columns"]
    block = rng.standard_normal((block_rows(rows, columns), columns), np.float32)
    block -= block.mean(axis=1, keepdims=True)
    return _pack(block / (_TOKEN_DEVIATION * columns**0.5), tensor["format"])


def _q4_0(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    """Rows as ggml packs them, whose products with normalized activations stay about 1, like those of `_normal`.

    A block of 32 columns is a float16 scale d and 16 bytes; byte j has weight j in its low half and weight j + 16 in
    its high half, and a weight is (nibble - 8) * d.
    """
    columns, (count, row_bytes) = tensor["columns"], tensor["shape"]
    rows = block_rows(count, columns)
    nibbles = rng.integers(1, 16, (2, rows, columns // 32, 16), np.uint8)
    packed = np.empty((rows, columns // 32, 18), np.uint8)
    packed[..., :2] = np.frombuffer(np.float16(1 / (_NIBBLE_DEVIATION * columns**0.5)).tobytes(), np.uint8)
    packed[..., 2:] = nibbles[0] | nibbles[1] << 4
    return packed.reshape(rows, row_bytes)


_ROLES: Mapping[str, Callable[[Mapping[str, Any], np.random.Generator, Firing], Array]] = {
    "embedding": _embedding,
    "linear": _normal,
    "output": _normal,
    "bundle": _bundle,
    "fc1": _first,
    "fc2": _normal,
    "head": _normal,
    "q4_0": _q4_0,
}
