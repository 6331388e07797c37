"""What a cubin says of its functions: registers, and memory that a thread or a block takes.

A cubin is an ELF file of 64 bits. Its section `.nv.info` has records: format and attribute, a byte each, and the size
of what follows, 16 bits; those of interest hold the number of a function's symbol and a value, 32 bits each. The
numbers of the attributes are those that `cuobjdump -elf` prints names for.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from picompile_codegen.errors import BuildError

_SIZED = 4  # the format of records that have a size
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT
_SYMBOL_BYTES = 24


@dataclass(frozen=True)
class Resources:
    """What a function takes: registers and local memory of a thread (spills are there), shared memory of a block."""

    registers: int
    local_bytes: int
    shared_bytes: int


def function_resources(cubin: bytes) -> dict[str, Resources]:
    """Every function of `cubin` by name. Raises `BuildError` if it is none."""
    try:
        sections = _sections(cubin)
        names = _symbols(sections[".symtab"], sections[".strtab"])
        found: dict[int, dict[str, int]] = {}
        for attribute, symbol, value in _records(sections[".nv.info"]):
            found.setdefault(symbol, {})["registers" if attribute == _REGISTERS else "local_bytes"] = value
        return {
            names[symbol]: Resources(
                values["registers"], values.get("local_bytes", 0), len(sections.get(f".nv.shared.{names[symbol]}", b""))
            )
            for symbol, values in found.items()
            if "registers" in values
        }
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise BuildError(f"the compiler of CUDA code returned no cubin ({error!r})") from error


def _sections(cubin: bytes) -> dict[str, bytes]:
    if cubin[:4] != b"\x7fELF":
        raise ValueError("no ELF file")
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + size * i) for i in range(count)]
    contents = [_content(cubin, header) for header in headers]
    return {_text(contents[names_at], header[0]): content for header, content in zip(headers, contents, strict=True)}


def _content(cubin: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    without_content = 8  # SHT_NOBITS
    return bytes(size) if kind == without_content else cubin[offset : offset + size]


def _symbols(table: bytes, texts: bytes) -> list[str]:
    places = (struct.unpack_from("<I", table, start)[0] for start in range(0, len(table), _SYMBOL_BYTES))
    return [_text(texts, place) for place in places]


def _records(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) of the records of interest."""
    place = 0
    while place < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form != _SIZED:
            continue
        if attribute in (_FRAME_SIZE, _REGISTERS):
            yield attribute, *struct.unpack_from("<II", info, place)
        place += size


def _text(texts: bytes, start: int) -> str:
    return texts[start : texts.index(b"\0", start)].decode()
