"""Makes an artifact of a pack whole: its weights, from a seed, and their entry in the manifest.

Nothing is trained, and the text means nothing. What fires is made so that a wanted share of the neurons is computed for
each token, other ones for another token:

- Embeddings are between 0.5 and 1.5, and what layers add to them is small, so that a block's input is mostly positive.
  The rows of gates are positive: every neuron that is computed fires, and its up and down rows are read.
- The rows of a predictor's first matrix add up to zero, so that only what tokens differ in reaches its hidden values;
  these and the rows of the second matrix are scaled so that logits are normal, with a deviation of about 1. The bias of
  a neuron is the quantile of its rate: it is computed for that share of the tokens.
- Hot neurons are the first of a layer. With a `skew` they have the share that a power law gives them in which 26 % of
  the neurons fire 80 % of the times, as PowerInfer's paper says of OPT-30B; without, all neurons have the same rate.

Which share was computed indeed is read from the engine's counters, and reported beside every speed.
"""

import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from _gpu_formats import Array, block_rows, pack, random_block

from picompile_runtime.artifact import WEIGHTS
from picompile_runtime.stamps import stamp

_ALIGNMENT = 64
_PART_BYTES = 2**26
_VARIANTS = 3
_DTYPES = {"uint8": "U8", "float32": "F32"}
# Of all times that neurons fire, what the hottest 26 % of them have.
_POWER = math.log(0.80) / math.log(0.26)
# No neuron fires for more tokens than this.
_MOST = 0.95
# What a layer adds to the stream, whose elements are about 1: little, where many of them follow each other.
_ADDED = 0.02
# The deviation of the elements of a normalized embedding that is uniform between 0.5 and 1.5.
_TOKEN_DEVIATION = (1 / 12) ** 0.5 / (13 / 12) ** 0.5


def unpack_artifact(archive: Path, folder: Path) -> dict[str, Any]:
    """Extracts a pack's zip file, but for what only people read; its manifest."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def write_weights(folder: Path, active: float, skew: bool, added: float = _ADDED, seed: int = 0) -> int:
    """Writes weights.safetensors and the manifest of an extracted artifact; bytes of the weights.

    `active` is the share of neurons to compute, `added` the deviation of what attention or a block adds to the stream.
    The file is hashed as it is written, so that the runtime need not read it once more.
    """
    tensors = json.loads((folder / "weights.json").read_text())["tensors"]
    constants = (folder / "constants.bin").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    neurons = manifest["model"]["ffn"]
    blocks = Blocks(seed, Firing(active, skew, neurons, added))
    digest, path = hashlib.sha256(), folder / WEIGHTS
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:

        def write(data: Any) -> None:
            hashed = pool.submit(digest.update, data)
            file.write(data)
            hashed.result()

        write(_header(tensors))
        for number, tensor in enumerate(tensors):
            for part in _content(tensor, constants, number, blocks):
                write(part)
    manifest["files"][WEIGHTS] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text)
    with path.open("rb") as file:
        stamp(path, file.fileno(), hashlib.sha256(text.encode()).hexdigest())
    return path.stat().st_size


def _header(tensors: list[dict[str, Any]]) -> bytes:
    entries, offset = {}, 0
    for tensor in tensors:
        size = _bytes(tensor)
        entry = {"dtype": _DTYPES[tensor["dtype"]], "shape": tensor["shape"], "data_offsets": [offset, offset + size]}
        entries[tensor["name"]] = entry
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _bytes(tensor: Mapping[str, Any]) -> int:
    return math.prod(tensor["shape"]) * np.dtype(tensor["dtype"]).itemsize


@dataclass(frozen=True)
class Firing:
    """How often neurons are computed: a share `active` of all, for any token. What they come to is about `added`."""

    active: float
    skew: bool
    neurons: int
    added: float = _ADDED

    def rates(self, hot: int) -> tuple[float, float]:
        """For which share of the tokens a hot neuron is computed, and for which a cold one."""
        if not 0 < hot < self.neurons or not self.skew:
            return self.active, self.active
        share = hot / self.neurons
        of_hot = min(_MOST, self.active * share**_POWER / share)
        return of_hot, (self.active - share * of_hot) / (1 - share)

    def biases(self, hot: int) -> Array:
        """Of each neuron the logit that it needs beside a normal one, float32 [neurons]."""
        rates = np.where(np.arange(self.neurons) < hot, *self.rates(hot))
        quantiles = {rate: NormalDist().inv_cdf(min(max(rate, 1e-9), 1 - 1e-9)) for rate in np.unique(rates)}
        return np.array([quantiles[rate] for rate in rates], np.float32)


class Blocks:
    """The random rows of matrices: `_VARIANTS` of each kind and shape, since drawing them takes longer than writing."""

    def __init__(self, seed: int, firing: Firing) -> None:
        self.seed, self.firing = seed, firing
        self._made: dict[tuple[Any, ...], Array] = {}

    def of(self, tensor: Mapping[str, Any], number: int) -> Array:
        """The rows of tensor `number`, uint8 [rows that differ, row bytes]."""
        variant, role = number % _VARIANTS, tensor["role"]
        key = (role, tensor["format"], *tensor["shape"], tensor["columns"], variant)
        if key not in self._made:
            rng = np.random.default_rng([self.seed, variant, list(_ROLES).index(role)])
            self._made[key] = _ROLES[role](tensor, rng, self.firing)
        return self._made[key]


def _content(tensor: Mapping[str, Any], constants: bytes, number: int, blocks: Blocks) -> Iterator[Any]:
    kind, size = tensor["kind"], _bytes(tensor)
    if kind == "constant":
        yield memoryview(constants)[tensor["start"] : tensor["start"] + tensor["bytes"]]
    elif kind in ("ones", "zeros"):
        yield np.full(size // 4, kind == "ones", np.float32).data.cast("B")
    elif kind == "rates":
        values = np.zeros(size // 4, np.float32)
        values[: blocks.firing.neurons] = blocks.firing.biases(tensor["hot"])
        yield values.data.cast("B")
    else:
        yield from _repeated(blocks.of(tensor, number), size)


def _repeated(block: Array, size: int) -> Iterator[memoryview]:
    """The bytes of a block of rows, again and again, up to `size`; in large parts."""
    flat = np.tile(block.reshape(-1), max(1, _PART_BYTES // block.nbytes)) if size > block.nbytes else block.reshape(-1)
    for start in range(0, size, len(flat)):
        yield flat[: size - start].data


def _normal(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    return random_block(rng, tensor["format"], tensor["shape"][0], tensor["columns"])


def _output(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    return random_block(rng, tensor["format"], tensor["shape"][0], tensor["columns"], (firing.added,))


def _embedding(tensor: Mapping[str, Any], rng: np.random.Generator, firing: Firing) -> Array:
    count = block_rows(tensor["shape"][0], tensor["columns"])
    return pack(rng.uniform(0.5, 1.5, (count, tensor["columns"])).astype(np.float32), tensor["format"])


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
    return pack(block / (_TOKEN_DEVIATION * columns**0.5), tensor["format"])


_ROLES: Mapping[str, Callable[[Mapping[str, Any], np.random.Generator, Firing], Array]] = {
    "embedding": _embedding,
    "linear": _normal,
    "output": _output,
    "bundle": _bundle,
    "fc1": _first,
    "fc2": _normal,
    "head": _normal,
}
