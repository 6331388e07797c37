"""The code of an artifact: the same kernels for one or several instruction sets, and which of them runs here."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from picompile_runtime.checks import shown
from picompile_runtime.errors import MachineError, RequestError
from picompile_runtime.machine import is_machine, missing_features

ISA_VARIABLE = "PICOMPILE_ISA"


@dataclass(frozen=True)
class Variant:
    """The code in `file`, for a `machine` (as `uname -m` says it) whose processor has all of `features`."""

    isa: str
    machine: str
    features: tuple[str, ...]
    file: str

    @property
    def runs_here(self) -> bool:
        """Whether this machine has all that it needs."""
        return is_machine(self.machine) and not missing_features(self.features)


def choose(variants: Sequence[Variant]) -> Variant:
    """The first of `variants`, which are listed best first, that runs here; or the one that PICOMPILE_ISA names.

    Raises MachineError where none does, the one asked for included, and RequestError for one that is not there.
    """
    if asked := os.environ.get(ISA_VARIABLE):
        known = ", ".join(variant.isa for variant in variants)
        variants = [variant for variant in variants if variant.isa == asked]
        if not variants:
            raise RequestError(f"{ISA_VARIABLE} is {shown(asked)}, but the artifact has code for: {known}")
    found = next((variant for variant in variants if variant.runs_here), None)
    if found is None:
        raise _none_runs(variants)
    return found


def _none_runs(variants: Sequence[Variant]) -> MachineError:
    """Says what the variant that comes nearest to this machine asks for."""
    lacking = [missing_features(variant.features) for variant in variants if is_machine(variant.machine)]
    if not lacking:
        machines = " or ".join(sorted({variant.machine for variant in variants}))
        here = f"{platform.system()} on {platform.machine()}"
        return MachineError(f"the artifact is for Linux on {machines}, this is {here}; compile the model for this one")
    nearest = min(lacking, key=len)
    return MachineError(f"the artifact needs a processor with {', '.join(nearest)}; compile the model for this one")
