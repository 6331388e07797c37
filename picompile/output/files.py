"""Files inside an output folder that is reserved, errors of writing them, hard links, and the folders above."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from picompile.errors import DoesNotFitError, UsageError
from picompile.output.leftovers import sync_folder


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block succeeds: it is synced, then renamed. Until then `path` stays.

    Only for a folder whose output path is reserved: a second writer would use the same temporary name.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with explaining_write_errors(path, temporary):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def json_bytes(content: Mapping[str, Any], errors: str = "strict") -> bytes:
    """Return `content` as indented JSON that people and `diff` can read; `errors` as in `str.encode`."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", errors)


# A full disk, the user's quota, and the limit on the size of files.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries written in Rust raise their own errors, with the number in the text.
_IN_TEXT = ("os error 28)", "os error 122)", "os error 27)")


def is_full(error: BaseException) -> bool:
    """Return whether `error` means that the file system is full."""
    if isinstance(error, OSError):
        return error.errno in DISK_FULL
    return isinstance(error, Exception) and any(text in str(error) for text in _IN_TEXT)


@contextmanager
def explaining_write_errors(output: Path, temporary: Path) -> Iterator[None]:
    """Turn a full disk inside the block into a `DoesNotFitError`, and other failures to write into a `UsageError`.

    Both name the folder of `output`. Errors that name a file outside of `temporary` pass unchanged: they are about
    another disk.
    """
    try:
        yield
    except Exception as error:
        named = getattr(error, "filename", None)
        if named is not None and not Path(str(named)).is_relative_to(temporary):
            raise
        if is_full(error):
            raise DoesNotFitError(f"{output.parent}: {_reason(error)}; {output} was not written") from error
        if not _is_file_error(error):
            raise
        raise UsageError(f"{output} cannot be written: {_reason(error)}") from error


def _is_file_error(error: Exception) -> bool:
    """Return whether writing a file can raise `error`: a system error, but not one of pipes, sockets or processes."""
    others = (ConnectionError, TimeoutError, ChildProcessError, BlockingIOError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, others)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or os.strerror(errno.ENOSPC)


def link_tree(source: Path, target: Path, skip: Callable[[Path], bool] = lambda path: False) -> None:
    """Put the content of `source` into `target`, as hard links where the file system has them, else as copies.

    Paths, relative to `source`, for which `skip` returns true are left out. From then on files must be replaced, never
    changed in place: both folders share them.
    """
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(map(skip, (relative, *relative.parents))):
            continue
        new = target / relative
        if path.is_dir() and not path.is_symlink():
            new.mkdir(exist_ok=True)
            continue
        try:
            os.link(path, new, follow_symlinks=False)
        except OSError:
            shutil.copy2(path, new, follow_symlinks=False)


@contextmanager
def parents_of(output: Path) -> Iterator[None]:
    """Make the folders above `output`, and remove those that were made if the block fails."""
    made: list[Path] = []
    try:
        for parent in reversed(output.absolute().parents):
            if not parent.exists():
                # Another process may make it at the same time.
                parent.mkdir(exist_ok=True)
                made.append(parent)
        yield
    except BaseException:
        for parent in reversed(made):
            with suppress(OSError):  # something else is in it
                parent.rmdir()
        raise


# A safetensors file is a u64 length, a JSON header of that length, and the tensors' data
# (https://github.com/huggingface/safetensors). The header is written here because our writers put one tensor after
# another into the file, while `safetensors.torch.save_file` needs all tensors in memory at once, and copies them.

# A tensor's name, its dtype as safetensors calls it (`F16`), its shape, and its size in bytes.
TensorRecord = tuple[str, str, tuple[int, ...], int]


def safetensors_header(
    tensors: Iterable[TensorRecord], metadata: Mapping[str, str] | None = None, alignment_bytes: int = 8
) -> bytes:
    """Return the bytes before the data of a safetensors file: the length and the JSON header.

    Args:
        tensors: The tensors in the order of their data, which follow each other without gaps.
        metadata: Texts for the header's `__metadata__`; the entry is left out if there are none.
        alignment_bytes: The header is padded with spaces so that the data begin at a multiple of this.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // alignment_bytes) * alignment_bytes - 8
    return struct.pack("<Q", padded) + text.ljust(padded)


def read_safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begin, in bytes, and the entry of each tensor by its name.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not begin with a header, or is shorter than its header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path}: a header of {length} bytes is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header
