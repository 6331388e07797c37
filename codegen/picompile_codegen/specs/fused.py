"""Kernels of a GPU that do the work of several: projections with additions and norms, and sums of several values."""

from collections.abc import Iterator
from dataclasses import dataclass

from picompile_codegen.specs.arguments import Declaration, KernelSpec, floats, floats_out, symbol
from picompile_codegen.specs.tokens import LayerNormSpec, LinearSpec, RmsNormSpec
from picompile_codegen.specs.transfer import received

Norm = RmsNormSpec | LayerNormSpec


@dataclass(frozen=True)
class LinearAddSpec(KernelSpec):
    """y = added + (x · wᵀ + bias), and with a `norm` also normed = norm(y). Only a GPU has this kernel.

    Arguments are those of `linear`, which has one row, and added float32 [1, n] → y [1, n]; those of `norm` but for x
    and y are called norm_weight and norm_bias → normed [1, n].
    """

    op = "linear"

    linear: LinearSpec
    norm: Norm | None = None

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        return symbol(self.linear.name, "add", "" if self.norm is None else self.norm.name)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        *inputs, y = self.linear.declare()
        yield from inputs
        yield floats("added", 1, self.linear.n)
        yield y
        yield from _norm_arguments(self.norm)


@dataclass(frozen=True)
class SumNormSpec(KernelSpec):
    """y = x0 + x1 + …, from the left, and normed = norm(y). Only a GPU has this kernel.

    x0, x1 … float32 [rows, dim] → y [rows, dim], normed [rows, dim]. With `received` the last of the `terms` is
    `source`, which lies in shared memory and is complete once the flag is set; `counted` as in `ReceiveSpec`.
    """

    dim: int
    rows: int
    terms: int
    norm: Norm | None
    received: bool = False
    counted: bool = False

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        received = "counted" if self.counted else "received" if self.received else ""
        parts = (self.dim, f"r{self.rows}", f"t{self.terms}", received)
        return symbol("sum", *parts, "" if self.norm is None else self.norm.name)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        for number in range(self.terms - self.received):
            yield floats(f"x{number}", self.rows, self.dim)
        if self.received:
            yield from received(self.rows, self.dim, counted=self.counted)
        yield floats_out("y", self.rows, self.dim)
        yield from _norm_arguments(self.norm)


def _norm_arguments(norm: Norm | None) -> Iterator[Declaration]:
    if norm is None:
        return
    for declared in norm.declare():
        if declared.name == "y":
            yield floats_out("normed", norm.rows, norm.dim)
        elif declared.name != "x":
            yield floats(f"norm_{declared.name}", norm.dim)
