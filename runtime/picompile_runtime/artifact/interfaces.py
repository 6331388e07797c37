"""The interfaces of kernels, and the variants of an artifact's code.

An artifact's code has a table that says which arguments its kernels take; `call_checks` compares the program's calls
with it. The table is JSON:
{"linear_q4_8x16_r1": {"tokens": 1, "args": [{"name": "step", "dtype": "int32", "shape": [8]}, …]}}
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.devices.machine import is_machine, missing_features
from picompile_runtime.errors import MachineError, RequestError
from picompile_runtime.request_checks import shown

ACCESSES = ("in", "out", "scratch", "tickets", "adds", "state", "sets", "awaits", "abandons")
"""Ways in which a kernel uses an argument: it reads it, fills it, uses it as scratch memory, finds zeros in it and
leaves zeros, adds to its counters, reads and writes the state of sequences in it, sets it as a flag, waits for it as a
flag, or notes in it that it gave up waiting."""

_MOST = 2**31 - 1


@dataclass(frozen=True)
class KernelParameter:
    """One argument as a kernel declares it.

    If `below` is not None, integers that the kernel reads must be from 0 to `below` - 1, and those that it writes are.
    `copies` names the parameter whose content the kernel copies to this one. `counted` names the one that says how much
    of the first dimension there is: n / (its `below` - 1).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    access: str
    below: int | None
    copies: str | None
    counted: str | None = None

    @property
    def writes(self) -> bool:
        """Whether the kernel writes to the argument."""
        return self.access not in ("in", "awaits")


@dataclass(frozen=True)
class KernelInterface:
    """A kernel's parameters, and how many `tokens`, `positions` and `slots` a step may have; 0 is any number."""

    tokens: int
    positions: int
    slots: int
    parameters: tuple[KernelParameter, ...]


def read_interfaces(text: bytes, where: str) -> Mapping[str, KernelInterface]:
    """Return the interfaces in a library's table by kernel. Raises ArtifactError, naming `where`."""
    return parse_interfaces(parse_object(text, where))


def parse_interfaces(root: Fields) -> Mapping[str, KernelInterface]:
    """Return the interfaces in `root` by the names of their kernels. Raises ArtifactError."""
    return {name: _interface(entry) for name, entry in root.members().items()}


def _interface(entry: Fields) -> KernelInterface:
    tokens, positions, slots = (entry.optional_integer(key, 0, _MOST) for key in ("tokens", "positions", "slots"))
    return KernelInterface(tokens or 0, positions or 0, slots or 0, tuple(map(_parameter, entry.objects("args"))))


def _parameter(entry: Fields) -> KernelParameter:
    return KernelParameter(
        name=entry.text("name"),
        dtype=entry.text("dtype"),
        shape=entry.shape("shape"),
        access=entry.one_of("access", ACCESSES),
        below=entry.optional_integer("below", 0, _MOST),
        copies=entry.text("copies") if "copies" in entry.data else None,
        counted=entry.text("counted") if "counted" in entry.data else None,
    )


ISA_VARIABLE = "PICOMPILE_ISA"


@dataclass(frozen=True)
class CodeVariant:
    """The code in `file`, for the instruction set `isa`: a `machine` (as in `uname -m`) that has all of `features`."""

    isa: str
    machine: str
    features: tuple[str, ...]
    file: str

    @property
    def runs_here(self) -> bool:
        """Whether this machine has everything that the code needs."""
        return is_machine(self.machine) and not missing_features(self.features)


def choose_variant(variants: Sequence[CodeVariant], isa: str | None = None) -> CodeVariant:
    """Return the variant to use here: that of `isa`, or that which PICOMPILE_ISA names, else the first that runs here.

    Raises MachineError if none runs here, or not the one asked for, and RequestError if that one does not exist.
    """
    if asked := isa or os.environ.get(ISA_VARIABLE):
        known = ", ".join(variant.isa for variant in variants)
        variants = [variant for variant in variants if variant.isa == asked]
        if not variants:
            name = "isa" if isa else ISA_VARIABLE
            raise RequestError(f"{name} is {shown(asked)}, but the artifact has code for: {known}")
    found = next((variant for variant in variants if variant.runs_here), None)
    if found is None:
        raise _none_runs(variants)
    return found


def _none_runs(variants: Sequence[CodeVariant]) -> MachineError:
    """Return the error for a machine that runs none: it says what the variant nearest to the machine needs."""
    lacking = [missing_features(variant.features) for variant in variants if is_machine(variant.machine)]
    if not lacking:
        machines = " or ".join(sorted({variant.machine for variant in variants}))
        here = f"{platform.system()} on {platform.machine()}"
        return MachineError(f"the artifact is for Linux on {machines}, this is {here}; compile the model for this one")
    nearest = min(lacking, key=len)
    return MachineError(f"the artifact needs a processor with {', '.join(nearest)}; compile the model for this one")
