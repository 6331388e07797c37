"""A router's choice of experts."""

from collections.abc import Iterator
from dataclasses import dataclass

from picompile_codegen.specs.arguments import Declaration, KernelSpec, floats, floats_out, optional_floats, symbol


@dataclass(frozen=True)
class RouteSpec(KernelSpec):
    """gains[t, e] = scale · expert_scale[e] · w[t, e] for the `chosen` best experts of token t, 0 for the others.

    The fields are the arguments of the operator `route` (`picompile_passes.dialect.route`), which says what they mean.
    logits float32 [rows, experts], bias and expert_scale float32 [experts] → gains float32 [rows, experts]. Of equal
    experts the first is chosen; NaN is above all numbers.
    """

    op = "route"

    experts: int
    rows: int
    chosen: int
    scores: str
    normalized: str
    scale: float = 1.0
    eps: float = 0.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: str = "max"
    bias: bool = False
    expert_scale: bool = False

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        is_grouped = self.chosen_groups < self.groups
        return symbol(
            "route",
            f"{self.chosen}of{self.experts}",
            f"r{self.rows}",
            self.scores,
            f"by_{self.normalized}",
            "" if self.scale == 1.0 else f"times{self.scale}",
            "" if self.eps == 0.0 else f"eps{self.eps}",
            f"groups{self.chosen_groups}of{self.groups}{self.group_score}" if is_grouped else "",
            "b" * self.bias + "s" * self.expert_scale,
        )

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("logits", self.rows, self.experts)
        yield from optional_floats(
            [("bias", self.experts, self.bias), ("expert_scale", self.experts, self.expert_scale)]
        )
        yield floats_out("gains", self.rows, self.experts)
