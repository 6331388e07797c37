"""Writing a synthesized checkpoint: its recipe, checks of its folder, and files filled one tensor at a time."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from picompile.errors import UsageError
from picompile.output.files import safetensors_header
from picompile.output.place import holds_something, require_disk_space, require_parent_folder
from picompile.synth.shapes import ModelShape

# Writing a checkpoint: checks of its folder, and safetensors files that are filled one tensor at a time.


# Configuration and tokenizer.
_OTHER_BYTES = 16 << 20


def check_free(output: Path) -> None:
    """Raise `UsageError` if something exists at `output`, or the folder above it does not."""
    if holds_something(output):
        raise UsageError(f"{output} exists; choose another place or remove it first")
    require_parent_folder(output)


def check_disk(output: Path, needed_bytes: int) -> None:
    """Raise `DoesNotFitError` if the disk cannot hold `needed_bytes` of tensors and the checkpoint's other files."""
    message = "the checkpoint needs {needed}, and the disk of {folder} has {free} free"
    require_disk_space(output, needed_bytes + _OTHER_BYTES, message)


DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_SAFETENSORS_DTYPES = {"f16": "F16", "bf16": "BF16", "f32": "F32"}
SHARD_BYTES = 2_000_000_000

Table = Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    shape: tuple[int, ...]


class CheckpointWriter:
    """Writer of safetensors files whose tensors are put in any order, each exactly once.

    The headers are written first, since names, shapes and dtype are known; a tensor goes to its place as soon as it
    exists, so that no more than one of them is ever held.
    """

    def __init__(self, folder: Path, stem: str, table: Table, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._dtype = DTYPES[dtype]
        self._places: dict[str, _Place] = {}
        self._rows: dict[str, int] = {}
        self._files: list[BinaryIO] = []
        shards = split_shards(table, self._dtype.itemsize, shard_bytes)
        names = [
            f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        for name, shard in zip(names, shards, strict=True):
            self._open(folder / name, shard, _SAFETENSORS_DTYPES[dtype])
        if len(shards) > 1:
            _write_index(folder / f"{stem}.safetensors.index.json", names, shards, self._dtype.itemsize)

    def _open(self, path: Path, shard: Table, dtype: str) -> None:
        sizes = [prod(shape) * self._dtype.itemsize for _, shape in shard]
        records = [(name, dtype, shape, size) for (name, shape), size in zip(shard, sizes, strict=True)]
        header = safetensors_header(records, {"format": "pt"})
        offset = len(header)
        for (name, shape), size in zip(shard, sizes, strict=True):
            self._places[name] = _Place(len(self._files), offset, shape)
            offset += size
        file = path.open("wb")
        self._files.append(file)
        file.write(header)
        file.truncate(offset)

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Write the next rows of tensor `name`, usually all of them, and return them as written, still in float32.

        `tensor` itself is rounded, in place.
        """
        place, first = self._places[name], self._rows.get(name, 0)
        if tensor.shape[1:] != place.shape[1:] or first + tensor.shape[0] > place.shape[0]:
            raise ValueError(f"{name}: rows of {tuple(tensor.shape)} after {first} do not fit into {place.shape}")
        rounded = tensor.to(self._dtype).contiguous()
        file = self._files[place.file]
        file.seek(place.offset + first * prod(place.shape[1:]) * self._dtype.itemsize)
        file.write(rounded.view(-1).view(torch.uint8).numpy().data)
        self._rows[name] = first + tensor.shape[0]
        return tensor.copy_(rounded)

    def round(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in float32, rounded to values that the files can hold."""
        return tensor.to(self._dtype).to(torch.float32)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the files. Raise `ValueError` if a tensor is missing: a checkpoint with holes must not be kept."""
        for file in self._files:
            file.close()
        if error is not None:
            return
        missing = [name for name, place in self._places.items() if self._rows.get(name) != place.shape[0]]
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written, among them {missing[0]}")


def split_shards(table: Table, item_bytes: int, shard_bytes: int) -> list[Table]:
    """Return the tensors in order, cut into files of at most `shard_bytes` each.

    A file is larger only where a single tensor is.
    """
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, shape in table:
        size = prod(shape) * item_bytes
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, shape))
        used += size
    return list(shards)


def table_bytes(table: Iterable[tuple[str, tuple[int, ...]]], dtype: str) -> int:
    """Return the size of all tensors of a table, in bytes."""
    return sum(prod(shape) for _, shape in table) * DTYPES[dtype].itemsize


def _write_index(path: Path, names: Sequence[str], shards: Sequence[Table], item_bytes: int) -> None:
    total = sum(prod(shape) for shard in shards for _, shape in shard) * item_bytes
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
    content = {"metadata": {"total_size": total}, "weight_map": where}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The recipe of a synthesized checkpoint: the request, its random numbers, and the writers of its tensors.


# The constant direction's entries in the stream, beside entries of about 1. More of it makes offsets small; less leaves
# room for everything else.
CONSTANT = 0.5


@dataclass(frozen=True)
class Recipe:
    """One synthesis.

    `rates` float64 [ffn] are the firing rates of a layer's neurons, ascending; `rank` is the predictors'. `direction`
    float32 [hidden] is the constant direction: entries ±1, as many of each. Every matrix that reads the stream ignores
    it and every matrix that writes to the stream leaves it alone, but for the gates' offsets. `signs` float32 [hidden]
    are those of the final norm. `subspace` float32 [r, hidden] are orthonormal rows, orthogonal to the constant
    direction: all that decides which neurons fire. Embeddings are of one length in it, so that every token fires about
    as many.
    """

    shape: ModelShape
    seed: int
    rank: int
    rates: Tensor
    direction: Tensor
    signs: Tensor
    subspace: Tensor
    weights: CheckpointWriter
    predictors: CheckpointWriter

    @property
    def offset(self) -> str:
        """The source of the offset of a neuron's gate.

        `bias`: the gate has one. `norm`: the bias of the layer norm before the FFN carries the constant direction.
        `stream`: the embedding carries it, and it stays in the residual stream.
        """
        if self.shape.ffn_bias:
            return "bias"
        return "norm" if self.shape.family.norm == "layer" else "stream"

    def name(self, role: str, layer: int) -> str:
        """The checkpoint's name of a layer's role, without `.weight` or `.bias`."""
        return self.shape.family.names[role].format(layer)

    def generator(self, name: str) -> torch.Generator:
        """Return the generator of `name`; it depends on the seed, but not on what was made before."""
        return generator(self.seed, name)

    def uniform(self, name: str, rows: int, columns: int, scale: float) -> Tensor:
        """A matrix [rows, columns] whose entries have the deviation scale / sqrt(columns).

        Uniform, since a normal distribution takes five times as long to draw and products with it look the same.
        """
        bound = scale * (3 / columns) ** 0.5
        return torch.empty(rows, columns).uniform_(-bound, bound, generator=self.generator(name))

    def orthonormal(self, name: str, rows: Tensor) -> Tensor:
        """Random orthonormal combinations of orthonormal `rows` [r, columns], of the same shape."""
        rotation: Tensor = torch.linalg.qr(torch.randn(len(rows), len(rows), generator=self.generator(name))).Q
        return rotation @ rows

    def ignore_direction(self, matrix: Tensor) -> Tensor:
        """Make the rows of a matrix [rows, hidden] orthogonal to the constant direction, in place."""
        return matrix.addr_(matrix @ self.direction, self.direction, alpha=-1 / self.shape.hidden)

    def leave_direction(self, matrix: Tensor) -> Tensor:
        """Make the columns of a matrix [hidden, columns] orthogonal to the constant direction, in place."""
        return matrix.addr_(self.direction, self.direction @ matrix, alpha=-1 / self.shape.hidden)


def generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def balanced_signs(seed: int, name: str, count: int) -> Tensor:
    """Return float32 [count] of ±1, half of them negative."""
    signs = torch.ones(count)
    signs[torch.randperm(count, generator=generator(seed, name))[: count // 2]] = -1
    return signs


def random_subspace(seed: int, rows: int, avoided: Tensor) -> Tensor:
    """float32 [rows, hidden]: random orthonormal rows, orthogonal to those of `avoided` [any, hidden]."""
    drawn = torch.randn(rows, avoided.shape[1], generator=generator(seed, "subspace"))
    unit: Tensor = torch.linalg.qr(avoided.T).Q.T
    subspace: Tensor = torch.linalg.qr((drawn - (drawn @ unit.T) @ unit).T).Q.T
    return subspace.contiguous()
