"""Feed-forward blocks of experts, of which each token chooses a few."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from picompile_codegen.specs.arguments import Declaration, MatrixArgument, floats, symbol
from picompile_codegen.specs.ffn import WholeFfnSpec


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(WholeFfnSpec):
    """y = Σ gains[e] · (h of e · downᵀ of e + expert_bias of e) + down_bias, over the experts e whose gain is not 0.

    h is that of a `WholeFfnSpec`, whose `neurons` are those of all `experts`: expert e has the rows from e · size on of
    gate and up, where size is its number of neurons, and in down, packed [experts · dim, size], those from e · dim on.
    gains float32 [rows, experts], expert_bias float32 [experts · dim], expert by expert. No more than `chosen` gains of
    a token may be other than 0: it computes the first `chosen` experts of those that are. Experts that no token chose
    are not read.

    A token has the same bits whichever tokens are computed beside it. `stats` counts the neurons of the experts that
    tokens chose.
    """

    experts: int
    chosen: int
    expert_bias: bool = False

    @property
    def expert_neurons(self) -> int:
        """Neurons of an expert."""
        return self.neurons // self.experts

    @property
    def row_neurons(self) -> int:
        """The most neurons that a row computes."""
        return self.chosen * self.expert_neurons

    @property
    def pairs(self) -> int:
        """The most pairs of a token and an expert that it chose."""
        return self.rows * self.chosen

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        return symbol("experts", f"{self.chosen}of{self.experts}", super().name, "be" * self.expert_bias)

    @property
    def neuron_arguments(self) -> Mapping[str, bool]:
        """Arguments with rows for each neuron or expert, of which those of chosen experts are read."""
        return dict.fromkeys(super().neuron_arguments, False)

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        for declaration in super().declare():
            if declaration.name == "down_w":
                down, rows = self.formats[-1], self.experts * self.dim
                yield MatrixArgument("down_w", down, rows=rows, columns=self.expert_neurons, panels=True)
                continue
            if declaration.name == "stats" and self.expert_bias:
                yield floats("expert_bias", self.experts * self.dim)
            yield declaration
            if declaration.name == "x":
                yield floats("gains", self.rows, self.experts)
