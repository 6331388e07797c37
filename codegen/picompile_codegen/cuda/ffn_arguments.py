"""The tensors of a feed-forward block on a GPU, and where each matrix of a neuron is."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cuda.activations import activate
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.kernels.ffn_shape import FfnShape
from picompile_codegen.kernels.tensor import Expr, Tensor, bind


@dataclass(frozen=True)
class CudaFfn:
    """The tensors of a block, in the order in which they are passed; scratch and y follow."""

    shape: FfnShape
    x: Tensor
    mask: Tensor | None
    table: Tensor | None
    decide: CudaMatrix | None
    bundle: CudaMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    stats: Tensor

    @property
    def first_matrix(self) -> CudaMatrix:
        """The matrix that decides: it has the rows of gate, or of up where there is no gate."""
        return self.bundle if self.decide is None else self.decide

    @property
    def first_bias(self) -> Tensor | None:
        """Its bias."""
        return self.gate_bias if self.shape.gated else self.up_bias

    def first_row(self, neuron: Expr) -> Expr:
        """The row of a neuron in `first_matrix`."""
        return neuron if self.decide is not None else neuron * self.shape.bundle_parts

    def up_row(self, neuron: Expr) -> Expr:
        """The row of up in the bundle of a gated block."""
        return neuron * self.shape.bundle_parts + (self.shape.bundle_parts - 2)

    def down_row(self, neuron: Expr) -> Expr:
        """The row of down in the bundle."""
        return neuron * self.shape.bundle_parts + (self.shape.bundle_parts - 1)

    def is_named(self, token: Expr, neuron: Expr) -> Expr:
        """Whether the mask names a neuron."""
        column = neuron if self.table is None else self.table[neuron]
        return self.mask[token, column] != tirx.const(0, "uint8")  # type: ignore[index]

    def fires(self, first: Expr) -> Expr:
        """Whether a neuron whose product with `first_matrix` is this may send anything down."""
        return first > tirx.FloatImm("float32", self.shape.threshold)

    def output(self, first: Expr, up: Expr | None) -> Expr:
        """h, from the products with gate and up, biases included (`up` None where there is no gate)."""
        value = activate(self.shape.activation, first)
        return value if up is None else bind(value * activate(self.shape.up_activation, up))


def biased(value: Expr, bias: Tensor | None, index: Expr) -> Expr:
    """A sum and its bias, if there is any."""
    return bind(value if bias is None else value + bias[index])
