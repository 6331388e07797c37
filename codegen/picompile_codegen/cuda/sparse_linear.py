"""Projections that leave out small inputs, on a GPU: rows of a matrix that has one for each input, added up.

They are added as rows of down are, of neurons whose outputs are the inputs (`ffn_down.py`). An input that is left out
is zero to it, and so its row is not read. Of one token, or of several sequences' next tokens:
a block for each tile of columns and slice of the inputs lists the inputs of its slice and adds their rows; the last
block of a tile adds up its slices. Of a chunk all rows are read, by tiles of tokens and columns on tensor cores.
"""

from typing import Any

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, select, when
from picompile_codegen.cuda.ffn_down import DOWN_THREADS, DownPlan, add_down, multiply_down
from picompile_codegen.cuda.ffn_hidden import CudaFfn, NeuronGroups
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import address, run_extern, warp_sum, zero_registers
from picompile_codegen.specs import FfnSpec, SparseLinearSpec


class _KeptInputs(KernelTensor):
    """x float32 [rows, k] as it is read: 0 where an input is at or below its limit."""

    def __init__(self, x: KernelTensor, limits: KernelTensor) -> None:
        super().__init__(x._buffer)
        self._x, self._limits = x, limits

    def __getitem__(self, index: Any) -> Expr:
        token, column = index
        return select(self.is_small(token, column), 0.0, self._x[token, column])

    def is_small(self, token: Expr, column: Expr) -> Expr:
        """Return whether an input is left out; false for NaN."""
        return tirx.abs(self._x[token, column]) <= self._limits[column]


@body(SparseLinearSpec)
def sparse_linear(spec: SparseLinearSpec, function: CudaFunction) -> None:
    """Write the launches of a `SparseLinearSpec`."""
    kept = _KeptInputs(function["x"], function["limits"])
    block = _as_block(spec, function)
    if spec.reads_some:
        _tokens(function, block, kept)
    else:
        multiply_down(function, block, kept)


def _as_block(spec: SparseLinearSpec, function: CudaFunction) -> CudaFfn:
    """Return a block whose neurons' outputs are the inputs.

    Where `exact` decides by an up that lies apart, a bundle has the rows of down alone, and those that are not zero are
    added.
    """
    as_ffn = FfnSpec(
        kind="exact",
        format=spec.format,
        neurons=spec.k,
        dim=spec.n,
        rows=spec.rows,
        gated=False,
        activation="relu",
        up_activation="identity",
        gate_bias=False,
        up_bias=False,
        down_bias=spec.bias,
    )
    return CudaFfn(
        spec=as_ffn,
        count=None,
        x=function["x"],
        mask=None,
        table=None,
        decide=None,
        bundle=CudaMatrix.argument(function, "w"),
        gate_bias=None,
        up_bias=None,
        down_bias=function.get("bias"),
        gate_limits=None,
        output_limits=None,
        stats=function["stats"],
        y=function["y"],
    )


def _tokens(function: CudaFunction, block: CudaFfn, kept: _KeptInputs) -> None:
    rows, inputs = block.spec.rows, block.spec.neurons
    # One group: places are inputs in order.
    groups, plan = NeuronGroups(inputs, inputs, 1), DownPlan.of(block.bundle, inputs, rows, squares=False)
    add_down(function, block, groups, plan, kept, lambda place: _count(block, kept, plan, place))


def _count(block: CudaFfn, kept: _KeptInputs, plan: DownPlan, place: ThreadIndex) -> None:
    """Count the inputs of a slice that are read, warp by warp; of the blocks of all tiles, the first counts."""
    rows, inputs = block.spec.rows, block.spec.neurons
    token, start = bind(place.block % rows), bind(place.block_y * plan.places)
    stop = bind(minimum(start + plan.places, inputs))
    count = zero_registers(1)
    with loop(0, blocks_for(plan.places, DOWN_THREADS)) as turn:
        at = bind(start + turn * DOWN_THREADS + place.thread)
        is_read = tirx.if_then_else(at < stop, select(kept.is_small(token, at), 0.0, 1.0), 0.0)
        count[0] = count[0] + is_read
    total = warp_sum(count[0])
    with when(tirx.And(place.block // rows == 0, place.lane == 0)):
        for index in (0, 1):
            run_extern("pi_add_int64", address(block.stats, index), bind(tirx.Cast("int32", total)))
