"""The highest of a vocabulary's scores, on a GPU: a block for each slice of it, then one for what these have found.

A score and its token are one number, of which no two are equal: so the result has one order only, and does not depend
on the threads'. The scores themselves, with all their bits, are read once more at the end.
"""

from tvm import tirx

from picompile_codegen.cuda.function import CudaFunction, CudaKernel, Place, blocks_for
from picompile_codegen.cuda.memory import loads_first
from picompile_codegen.cuda.sorted_runs import LOWEST, RUN, THREADS, SortedRuns
from picompile_codegen.kernels.leading import MOST_LEADING, order_of
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, when

# What a block takes of a row: 64 to 128 of them for vocabularies of 128 to 256 thousand tokens.
_SLICE = 2048
_LAST_ID = 2**31 - 1


def leading_logits(*, vocab: int, rows: int) -> CudaKernel:
    """The n = min(64, vocab) highest logits of each row, highest first, and their tokens.

    logits float32 [rows, vocab] → scores float32 [rows, n], ids int32 [rows, n]. Of equal logits the lower token comes
    first; NaN comes before all numbers.
    """
    function, count = CudaFunction("leading_logits", vocab, f"r{rows}"), min(MOST_LEADING, vocab)
    slices = blocks_for(vocab, _SLICE)
    with function:
        logits = function.floats("logits", rows, vocab)
        scores, ids = (
            function.floats("scores", rows, count),
            function.argument("ids", "int32", rows, count, below=vocab),
        )
        found = function.scratch("found", "int64", rows, slices * RUN)
        with function.launch(grid=(slices, rows), block=THREADS) as place, when(place.block_y < function.tokens(rows)):
            _search_slice(logits, found, vocab, place)
        with function.launch(grid=rows, block=THREADS) as place, when(place.block < function.tokens(rows)):
            best = _merge_slices(found, slices, place)
            with when(place.thread < count):
                token = bind(_LAST_ID - tirx.Cast("int32", best & _LAST_ID))
                scores[place.block, place.thread] = logits[place.block, token]
                ids[place.block, place.thread] = token
    return function.cuda_kernel()


def _search_slice(logits: Tensor, found: Tensor, vocab: int, place: Place) -> None:
    """found[row, 64 · block …] = the highest of a slice of the row, in order."""
    runs = SortedRuns.for_runs(blocks_for(min(vocab, _SLICE), RUN), place)
    tokens = [bind(place.block * _SLICE + index) for index in runs.indices]
    insides = [bind(token < vocab) for token in tokens]
    zero = tirx.FloatImm("float32", 0.0)
    values = [
        bind(tirx.if_then_else(inside, logits[place.block_y, token], zero))
        for token, inside in zip(tokens, insides, strict=True)
    ]
    loads_first()
    keys = [_key(value, token, inside) for value, token, inside in zip(values, tokens, insides, strict=True)]
    runs.fill(keys)
    runs.sort()
    runs.merge()
    with when(place.thread < RUN):
        found[place.block_y, place.block * RUN + place.thread] = runs.highest(place.thread)


def _key(value: Expr, token: Expr, inside: Expr) -> Expr:
    """A number for a score and its token: the larger, the earlier in the result."""
    order = tirx.Cast("int64", order_of(value)) * tirx.IntImm("int64", 2**32)
    return bind(tirx.Select(inside, order + tirx.Cast("int64", _LAST_ID - token), LOWEST))


def _merge_slices(found: Tensor, slices: int, place: Place) -> Expr:
    """The number at a thread's place, of the first 64 of all slices of a row."""
    runs = SortedRuns.for_runs(slices, place)
    row = place.block

    def candidates(first: int, reverse: bool) -> list[Expr]:
        keys = []
        for index in runs.indices:
            run = bind(first + index // RUN)
            # A run in memory descends if its number is even, and what is merged with it the other way.
            descends = (index // RUN + reverse) % 2 == 0
            column = tirx.Select(descends, index % RUN, RUN - 1 - index % RUN)
            keys.append(bind(tirx.if_then_else(run < slices, found[row, run * RUN + column], LOWEST)))
        return keys

    runs.fill(candidates(0, reverse=False))
    for first in range(runs.count, slices, runs.count):
        runs.merge_with(candidates(first, reverse=True))
    runs.merge()
    return runs.highest(place.thread % RUN)
