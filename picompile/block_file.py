"""A file written in blocks that lie at multiples of their size.

Linux keeps what is written at once in one piece of memory where the file system can (ext4 since 6.16, XFS since 5.18).
Of such blocks it makes pages of 2 MiB when the file is mapped, and these are read up to 10 % faster than ones of 4 KiB:
the processor looks up 512 times fewer addresses.
"""

from pathlib import Path
from types import TracebackType

BLOCK_BYTES = 2 << 20


class BlockFile:
    """Replaces the file at `path`; a context that writes what is left at its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._block = bytearray(BLOCK_BYTES)
        self._filled = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends `data`."""
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
