"""The errors of the driver, as one small tree.

Every error carries the exit code that the command line ends with. `picompile_passes`, `picompile_codegen` and
`picompile_runtime` have trees of their own, since they do not import this package; the command line only looks at
`exit_code`, which all of them have.

| exit code | meaning | raised as |
| --- | --- | --- |
| 1 | a fault in picompile | `PicompileError`, and anything without an exit code |
| 2 | usage | `UsageError`, `TargetError` |
| 3 | model not supported | `UnsupportedModelError` |
| 4 | artifact not valid | `picompile_runtime.ArtifactError` |
| 5 | does not fit in memory or on disk | `DoesNotFitError` |
| 6 | wrong machine | `picompile_runtime.MachineError` |
| 7 | accuracy bound not met | `AccuracyError` |
"""

from collections.abc import Sequence
from typing import ClassVar


class PicompileError(Exception):
    """Root of the driver's errors. The first line of its text says what was wrong, where, and what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(PicompileError):
    """The user asked for something that cannot be done: a missing folder, an output in the way, a bad count."""

    exit_code: ClassVar[int] = 2


class TargetError(UsageError):
    """A target that does not exist, or that this version cannot compile for."""


class UnsupportedModelError(PicompileError):
    """A checkpoint that is not one of the supported families, or is damaged, or is not in safetensors."""

    exit_code: ClassVar[int] = 3


class DoesNotFitError(PicompileError):
    """More bytes needed than there are, in memory or on disk; the text names both figures."""

    exit_code: ClassVar[int] = 5


class AccuracyError(PicompileError):
    """The compiled model's perplexity is further above what it is compared with than the accuracy bound allows.

    `layers` are the layers whose predictors lose most, the worst first; none where the bound is that on the whole.
    """

    exit_code: ClassVar[int] = 7

    def __init__(self, message: str, layers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.layers = tuple(layers)


class SolverError(PicompileError):
    """The placement problem has no solution, or the solver failed on it."""
