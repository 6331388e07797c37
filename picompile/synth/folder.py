"""The folder of a checkpoint: it appears whole, or not at all."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from picompile.errors import DoesNotFitError, UsageError

# Configuration and tokenizer.
_OTHER_BYTES = 16 << 20


def check_place(output: Path, needed_bytes: int) -> None:
    """Refuses a place that is taken or cannot hold the checkpoint. Raises `UsageError` or `DoesNotFitError`."""
    parent = output.absolute().parent
    empty = output.is_dir() and not output.is_symlink() and not any(output.iterdir())
    if not empty and (output.exists() or output.is_symlink()):
        raise UsageError(f"{output} exists; choose another place or remove it first")
    if not parent.is_dir():
        raise UsageError(f"{parent} is no folder; create it first")
    try:
        # Asking the file system is the only test that holds for root and for read-only mounts alike.
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{output.name}."):
            pass
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}") from error
    free = shutil.disk_usage(parent).free
    if free < needed_bytes + _OTHER_BYTES:
        raise DoesNotFitError(
            f"the checkpoint needs {(needed_bytes + _OTHER_BYTES) / 2**30:.2f} GiB, and the disk of {parent} has "
            f"{free / 2**30:.2f} GiB free"
        )


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output` that becomes it when the block ends well, and is removed when it does not.

    Raises `UsageError` when the place cannot be written and `DoesNotFitError` when the disk fills up meanwhile.
    """
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.absolute().parent))
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(output)
    except OSError as error:
        _discard(temporary)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFitError(f"{output} was not written: the disk is full") from error
        raise UsageError(f"{output} cannot be written: {error.strerror or error}") from error
    except BaseException:
        _discard(temporary)
        raise


def _discard(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
