"""The interfaces of kernels: the table that the code of an artifact has of its own kernels.

A program says what is called with what, the code what that must be; `call_checks` compares the two. The table is JSON:
{"linear_q4_8x16_r1": {"tokens": 1, "args": [{"name": "step", "dtype": "int32", "shape": [8]}, …]}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from picompile_runtime.fields import Fields, parse_object

ACCESSES = ("in", "out", "scratch", "adds", "cache", "sets", "awaits", "abandons")
"""Ways in which a kernel uses an argument: reads it, fills it, uses it as scratch memory, adds to its counters, reads
and writes it as a KV cache, sets it as a flag, waits for it as a flag, or says in it that it gave up waiting."""

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Parameter:
    """One argument as a kernel declares it.

    Integers that are read must be from 0 to `below` - 1 where that is not None, and those that are written are.
    `copies` names the parameter whose content is copied to this one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    access: str
    below: int | None
    copies: str | None

    @property
    def writes(self) -> bool:
        """Whether the kernel changes it."""
        return self.access not in ("in", "awaits")


@dataclass(frozen=True)
class Interface:
    """One kernel. `tokens`, `positions` and `slots` are how many there may be in a step, 0 where it does not ask."""

    tokens: int
    positions: int
    slots: int
    parameters: tuple[Parameter, ...]


def read_interfaces(text: bytes, where: str) -> Mapping[str, Interface]:
    """Parse a library's table. Raises ArtifactError, which says that it is in `where`."""
    return parse_interfaces(parse_object(text, where))


def parse_interfaces(root: Fields) -> Mapping[str, Interface]:
    """Return the interfaces in `root` by the names of their kernels. Raises ArtifactError."""
    return {name: _interface(entry) for name, entry in root.members().items()}


def _interface(entry: Fields) -> Interface:
    tokens, positions, slots = (entry.optional_integer(key, 0, _MOST) for key in ("tokens", "positions", "slots"))
    return Interface(tokens or 0, positions or 0, slots or 0, tuple(map(_parameter, entry.objects("args"))))


def _parameter(entry: Fields) -> Parameter:
    return Parameter(
        name=entry.text("name"),
        dtype=entry.text("dtype"),
        shape=entry.shape("shape"),
        access=entry.one_of("access", ACCESSES),
        below=entry.optional_integer("below", 0, _MOST),
        copies=entry.text("copies") if "copies" in entry.data else None,
    )
