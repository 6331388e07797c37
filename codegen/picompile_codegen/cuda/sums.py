"""Sums of the residual stream with the norm that follows, on a GPU: a block has a row.

A term that comes from the host is waited for and read over the bus here, so that no launch is needed for it. What else
the block reads is under way before it waits.
"""

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, bind, when
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex
from picompile_codegen.cuda.matrix import ColumnLanes, block_threads, lanes_for
from picompile_codegen.cuda.norms import NormVectors, write_norm
from picompile_codegen.cuda.transfer import load_shared, wait_for_host
from picompile_codegen.specs import SumNormSpec


@body(SumNormSpec)
def sum_norm(spec: SumNormSpec, function: CudaFunction) -> None:
    """Write the launch of a `SumNormSpec`."""
    # The bus carries what a warp reads together: there, threads side by side read columns side by side.
    lanes = 1 if spec.received else lanes_for(spec.dim)
    with (
        function.launch(grid=spec.rows, block=block_threads(spec.dim, lanes), resident=1) as place,
        when(place.block < function.tokens(spec.rows)),
    ):
        columns = ColumnLanes.of(spec.dim, place.thread, lanes=lanes)
        values = _sums(spec, function, columns, place)
        if spec.norm is None:
            return
        vectors = NormVectors.of(columns, function, "norm_")
        out = function["normed"], place.block, 0
        write_norm(spec.norm, columns, values=values.__getitem__, vectors=vectors, out=out, thread=place.thread)


def _sums(spec: SumNormSpec, function: CudaFunction, columns: ColumnLanes, place: ThreadIndex) -> list[list[Expr]]:
    """Write y; return this thread's elements of it, by runs of columns."""
    numbers, row, y = range(len(columns.runs)), place.block, function["y"]
    terms = [function[f"x{number}"] for number in range(spec.terms - spec.received)]
    read = [[columns.load_run(number, x, row) for x in terms] for number in numbers]
    if spec.received:
        wanted = wait_for_host(function, place)
        source = function["source"]
        for number, (start, inside) in enumerate(columns.runs):
            is_read = tirx.And(inside, wanted)
            read[number].append([bind(tirx.if_then_else(is_read, load_shared(source, row, start), 0.0))])
    sums = []
    for number in numbers:
        total = read[number][0]
        for term in read[number][1:]:
            total = [bind(a + b) for a, b in zip(total, term, strict=True)]
        columns.store_run(number, y, row, total)
        sums.append(total)
    return sums
