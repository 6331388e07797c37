"""What the kernels of feed-forward blocks share: shapes, arguments, and where each matrix of a neuron is."""

from dataclasses import dataclass

from picompile_codegen.kernels.activations import activate
from picompile_codegen.kernels.matrix import Matrix
from picompile_codegen.kernels.tensor import Expr, Tensor, bind
from picompile_passes.dialect.activations import parse_activation


@dataclass(frozen=True)
class FfnShape:
    """The parameters of a block. See `ffn.ffn`."""

    kind: str
    neurons: int
    dim: int
    rows: int
    gated: bool
    activation: str
    up_activation: str

    @property
    def is_exact(self) -> bool:
        """Whether one matrix, kept apart from the bundle, decides which neurons are computed."""
        return self.kind == "exact"

    @property
    def is_masked(self) -> bool:
        """Whether a mask, made by another kernel, says which neurons are computed."""
        return self.kind == "masked"

    @property
    def threshold(self) -> float:
        """A neuron is silent unless its deciding product is above this."""
        return parse_activation(self.activation).threshold

    @property
    def is_sparse(self) -> bool:
        """Whether the activation silences neurons, whatever predicted them."""
        return parse_activation(self.activation).sparse

    @property
    def up_is_sparse(self) -> bool:
        """Whether up, too, silences neurons: dReLU."""
        return self.gated and parse_activation(self.up_activation).sparse

    @property
    def bundle_parts(self) -> int:
        """Rows of a neuron in the bundle."""
        return 2 + self.gated - self.is_exact


@dataclass(frozen=True)
class FfnArguments:
    """The tensors of a block, in the order in which they are passed; scratch and y follow."""

    shape: FfnShape
    x: Tensor
    mask: Tensor | None
    table: Tensor | None
    decide: Matrix | None
    bundle: Matrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    stats: Tensor

    @property
    def first_bias(self) -> Tensor | None:
        """The bias of the matrix that decides: gate, or up where there is no gate."""
        return self.gate_bias if self.shape.gated else self.up_bias

    def first_row(self, neuron: Expr) -> tuple[Matrix, Expr]:
        """Where gate is (up, where there is no gate): a matrix and a row of it."""
        if self.decide is not None:
            return self.decide, neuron
        return self.bundle, neuron * self.shape.bundle_parts

    def up_row(self, neuron: Expr) -> Expr:
        """The row of up in the bundle of a gated block."""
        return neuron * self.shape.bundle_parts + (self.shape.bundle_parts - 2)

    def down_row(self, neuron: Expr) -> Expr:
        """The row of down in the bundle."""
        return neuron * self.shape.bundle_parts + (self.shape.bundle_parts - 1)

    def bundle_rows(self, neuron: Expr) -> list[Expr]:
        """All rows of a neuron in the bundle."""
        return [bind(neuron * self.shape.bundle_parts + part) for part in range(self.shape.bundle_parts)]

    def output(self, first: Expr, up: Expr | None) -> Expr:
        """h of eight lanes, from the products with gate and up, biases included (`up` None where there is no gate)."""
        value = activate(self.shape.activation, first)
        return value if up is None else bind(value * activate(self.shape.up_activation, up))
