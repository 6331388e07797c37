"""Writing an artifact's files, into a folder that takes its place when it is whole (see `picompile.output`).

The same inputs give the same bytes. Weights are written in blocks that lie at multiples of their size.
Linux keeps what is written at once in one piece of memory where the file system can (ext4 since 6.16, XFS since 5.18).
Of such blocks it makes pages of 2 MiB when the file is mapped, and these are read up to 10 % faster than ones of 4 KiB:
the processor looks up 512 times fewer addresses.
"""

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from picompile.artifact.reuse import FileRange
from picompile.output.files import safetensors_header
from picompile.output.place import require_disk_space
from picompile_codegen.lowering.arena import ALIGNMENT_BYTES
from picompile_codegen.lowering.layouts import Evaluate
from picompile_codegen.lowering.packing import PackedTensor
from picompile_codegen.lowering.program import tensor_bytes
from picompile_runtime.artifact.manifest import WEIGHTS

BLOCK_BYTES = 2 << 20

# Tensors that are made ahead of being written take no more than this together, unless there is but one.
_AHEAD_BYTES = 64 << 20
# Files beside the weights: program, kernels, tokenizer. Generous, since it only guards against a full disk.
_OTHER_BYTES = 64 << 20
_SAFETENSORS_DTYPE = {"float32": "F32", "uint8": "U8"}


class BlockFile:
    """Replace the file at `path`, block by block; a context that writes the rest when it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._block = bytearray(BLOCK_BYTES)
        self._filled = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        rest = memoryview(data).cast("B")
        while len(rest):
            part = rest[: BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def __enter__(self) -> "BlockFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._flush()

    def _flush(self) -> None:
        rest = memoryview(self._block)[: self._filled]
        while len(rest):
            rest = rest[self._file.write(rest) :]
        self._filled = 0


def has_room(output: Path, weight_bytes: int) -> bool:
    """Return whether the disk of `output` can hold an artifact with `weight_bytes` of weights."""
    return shutil.disk_usage(output.absolute().parent).free >= weight_bytes + _OTHER_BYTES


def check_disk(output: Path, weight_bytes: int) -> None:
    """Raise `DoesNotFitError` if the disk of `output` cannot hold an artifact with `weight_bytes` of weights."""
    message = "the artifact needs {needed}, and the disk of {folder} has {free} free"
    require_disk_space(output, weight_bytes + _OTHER_BYTES, message)


def _safetensors_header(tensors: Sequence[PackedTensor]) -> bytes:
    """Return a safetensors header, padded with spaces so that the data begins at a multiple of the alignment."""
    records = [
        (each.name, _SAFETENSORS_DTYPE[each.dtype], each.shape, tensor_bytes(each.dtype, each.shape))
        for each in tensors
    ]
    return safetensors_header(records, alignment_bytes=ALIGNMENT_BYTES)


def write_weights(
    path: Path,
    tensors: Sequence[PackedTensor],
    evaluate: Evaluate,
    advance: Callable[[int], None],
    unchanged: Mapping[str, FileRange] | None = None,
    *,
    makers: int = 1,
) -> str:
    """Write the packed tensors one at a time; return the file's sha256.

    While a tensor is hashed and written, the next ones are made.

    Args:
        path: the file to write.
        tensors: the tensors, in the order that they have in the file.
        evaluate: gives the value of a constant subgraph.
        advance: receives the size of each tensor that is written, in bytes.
        unchanged: where the bytes of some tensors lie already, by name; they are copied from there.
        makers: how many small tensors are made at a time, where `evaluate` may be called by several threads.
    """
    digest = hashlib.sha256()
    with BlockFile(path) as file, ThreadPoolExecutor(1) as behind, ThreadPoolExecutor(makers) as ahead:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        def begin(tensor: PackedTensor, expected: int) -> "Future[Callable[[], None]]":
            if unchanged is not None and tensor.name in unchanged:
                source = unchanged[tensor.name]
                return ahead.submit(lambda: partial(_copy, source, write))
            return ahead.submit(lambda: partial(write, _made(tensor, expected, evaluate)))

        written = behind.submit(write, _safetensors_header(tensors))
        begun: deque[tuple[int, Future[Callable[[], None]]]] = deque()
        try:
            for tensor in tensors:
                expected = tensor_bytes(tensor.dtype, tensor.shape)
                # Memory holds two large tensors: this one, and the one before until it is written.
                while begun and (len(begun) >= makers or sum(size for size, _ in begun) + expected > _AHEAD_BYTES):
                    written = _next(begun, written, behind, advance)
                begun.append((expected, begin(tensor, expected)))
            while begun:
                written = _next(begun, written, behind, advance)
            written.result()
        except BaseException:
            for _, each in begun:
                each.cancel()
            raise
    return digest.hexdigest()


def _next(
    begun: "deque[tuple[int, Future[Callable[[], None]]]]",
    written: "Future[None]",
    behind: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> "Future[None]":
    """Have the first of the tensors that were begun written, once it is made and the one before is written."""
    size, made = begun.popleft()
    job = made.result()
    written.result()
    result = behind.submit(job)
    advance(size)
    return result


def _made(tensor: PackedTensor, expected: int, evaluate: Evaluate) -> memoryview:
    """Return the bytes of a tensor, of which there must be `expected`."""
    value = tensor.produce(evaluate).contiguous()
    if value.numel() * value.element_size() != expected:
        raise ValueError(f"{tensor.name}: {value.numel() * value.element_size()} bytes, planned {expected}")
    return value.view(-1).view(torch.uint8).numpy().data


def _copy(source: FileRange, write: Callable[[bytes], None]) -> None:
    """Pass the bytes of `source` to `write`, a block at a time."""
    with source.path.open("rb") as file:
        file.seek(source.start)
        left = source.size_bytes
        while left:
            data = file.read(min(left, BLOCK_BYTES))
            if not data:
                raise ValueError(f"{source.path} ends before {source.start + source.size_bytes} bytes")
            write(data)
            left -= len(data)


def weights_bytes(tensors: Sequence[PackedTensor]) -> int:
    """Return the size of the weights' file without its header."""
    return sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in tensors)


def file_record(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Return the manifest's record of one file. The hash is computed unless it is known from writing."""
    return {"bytes": path.stat().st_size, "sha256": sha256 or _digest(path)}


def file_records(folder: Path, weights_sha256: str) -> dict[str, Any]:
    """Return the size and hash of every file in an artifact's `folder` but the manifest."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {
        name: file_record(folder / name, weights_sha256 if name == WEIGHTS else None)
        for name in names
        if name != "manifest.json"
    }


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
