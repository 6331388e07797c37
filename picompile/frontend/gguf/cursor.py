"""Reading a file's header from front to back, never past the end of the file."""

import mmap
import struct

_LENGTH = struct.Struct("<Q")


class HeaderError(Exception):
    """Why a file is refused, without its name."""


class Cursor:
    """A place in `data`, moved on by what is read. Every method raises `HeaderError` where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.at = 0

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes. `what` they are goes into the error."""
        start = self._advance(count, what)
        return self._data[start : self.at]

    def number(self, letter: str, what: str) -> int:
        """Return the next number, little-endian, of struct's type `letter`; a float for `f` and `d`."""
        start = self._advance(self.size_of(letter), what)
        (value,) = struct.unpack_from("<" + letter, self._data, start)
        return value  # type: ignore[no-any-return]

    def text(self, longest: int, what: str) -> str:
        """Return the next string: its length in 8 bytes, then UTF-8."""
        length = self.number("Q", what)
        if length > longest:
            raise HeaderError(f"{what} is {length:,} bytes long; {longest} are read")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise HeaderError(f"{what} is not UTF-8") from error

    def skip(self, count: int, what: str) -> None:
        """Skip the next `count` bytes."""
        self._advance(count, what)

    def skip_texts(self, count: int, what: str) -> None:
        """Skip the next `count` strings, of any length and content."""
        at, unpack, data = self.at, _LENGTH.unpack_from, self._data
        last = self.size - _LENGTH.size
        for _ in range(count):
            if at > last:
                break
            at += _LENGTH.size + unpack(data, at)[0]
        else:
            self._advance(at - self.at, what)
            return
        raise HeaderError(f"cut or forged: {what} reaches to byte {at:,}, and it has {self.size:,}")

    def check_count(self, count: int, smallest_bytes: int, most: int, what: str) -> None:
        """Raise unless `count` things of at least `smallest_bytes` each can follow, and are not more than `most`."""
        if count * smallest_bytes > self.size - self.at:
            raise HeaderError(f"cut or forged: {count:,} {what} do not fit into its {self.size:,} bytes")
        if count > most:
            raise HeaderError(f"{count:,} {what}; at most {most:,} are read")

    @staticmethod
    def size_of(letter: str) -> int:
        """Return the bytes of a number of struct's type `letter`."""
        return struct.calcsize("<" + letter)

    def _advance(self, count: int, what: str) -> int:
        start, end = self.at, self.at + count
        if end > self.size:
            raise HeaderError(f"cut or forged: {what} reaches to byte {end:,}, and it has {self.size:,}")
        self.at = end
        return start
