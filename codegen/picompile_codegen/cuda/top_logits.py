"""Top logits on a GPU: the highest 64 scores of each slice of a vocabulary, then the highest 64 of all slices.

Runs of 64 keys are sorted; of two runs, the higher half is kept. A network of compare-and-swap steps (K. E.
Batcher, Sorting networks and their applications, 1968) takes the same steps whatever the numbers are: it has no
branches that threads could take differently, and no atomics. A warp sorts a run, so that steps inside of one need no
barrier.

A score and its token form one key, and no two keys are equal. So there is only one possible order of the result,
whichever order threads run in. The scores themselves, with all their bits, are read once more at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cpu.token_ops import order_of
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.memory import address, barrier, loads_first, run_extern, shared
from picompile_codegen.specs import MOST_TOP_LOGITS, TopLogitsSpec

RUN = MOST_TOP_LOGITS
_RUN_BITS = RUN.bit_length() - 1
THREADS = 512
# 16 KiB of the block's memory.
_MOST_RUNS = 32
# Lower than any number that is sorted.
LOWEST = tirx.IntImm("int64", -(2**63) + 1)


@dataclass(frozen=True)
class SortedRuns:
    """`count` runs of 64 int64 in the memory of a block, a power of two. Runs of even number descend, the others
    ascend, so that a pair of them is what a step of merging takes.

    Keys that a thread brings have `indices`: 0 to 63 are in the first run, 64 to 127 in the second, and so on. What is
    stored is changed by functions of prelude.cuh alone: between accesses of its own TVM would add barriers.
    """

    count: int
    indices: tuple[Expr, ...]
    _keys: KernelTensor
    _thread: Expr

    @classmethod
    def for_runs(cls, wanted: int, place: ThreadIndex) -> "SortedRuns":
        """Return as many runs as are wanted, if there is room for them. What is more goes into `merge_with`."""
        count = min(_MOST_RUNS, 1 << (wanted - 1).bit_length())
        turns = range(blocks_for(count * RUN, THREADS))
        indices = tuple(bind(turn * THREADS + place.thread) for turn in turns)
        return cls(count, indices, shared(count * RUN, dtype="int64"), place.thread)

    def fill(self, keys: Sequence[Expr]) -> None:
        """Store runs that are already sorted, each in its direction; `keys` are this thread's."""
        for index, key in zip(self.indices, keys, strict=True):
            with when(index < self.count * RUN):
                self._keys[index] = key
        barrier()

    def sort(self) -> None:
        """Sort unordered keys into runs."""
        with loop(1, _RUN_BITS + 1) as bits:
            self._sort_halves(bits, level=0)
        barrier()

    def merge_with(self, keys: Sequence[Expr]) -> None:
        """Keep the higher half of each run and of another one, which is sorted the other way."""
        for index, key in zip(self.indices, keys, strict=True):
            with when(index < self.count * RUN):
                run_extern("pi_keep_higher", address(self._keys, index), key)
        barrier()
        self._sort_halves(_RUN_BITS, level=0)
        barrier()

    def merge(self) -> None:
        """Keep the highest 64 keys of all runs, in the first run."""
        with loop(1, self.count.bit_length()) as level:
            self._keep_higher(level)
            barrier()
            self._sort_halves(_RUN_BITS, level)
            barrier()

    def highest(self, index: Expr) -> Expr:
        """Return a key of the first run after `merge`; index 0 is the highest."""
        return bind(self._keys[index])

    def _keep_higher(self, level: Expr) -> None:
        """Bitonic merge step: keep the element-wise maximum of two runs in the first; the result is bitonic."""
        kept = bind(self.count * RUN >> level)
        with loop(0, (kept + (THREADS - 1)) // THREADS) as turn:
            number = bind(turn * THREADS + self._thread)
            with when(number < kept):
                at = bind(_place(number, level))
                other = bind(self._keys[at + (RUN << (level - 1))])
                run_extern("pi_keep_higher", address(self._keys, at), other)

    def _sort_halves(self, bits: Expr, level: Expr) -> None:
        """Sort sequences of 2^bits that rise and then fall, or fall and then rise."""
        pairs = bind(self.count * RUN // 2 >> level)
        with loop(0, bits) as step:
            shift = bind(bits - 1 - step)
            with loop(0, (pairs + (THREADS - 1)) // THREADS) as turn:
                pair = bind(turn * THREADS + self._thread)
                with when(pair < pairs):
                    index = bind((pair >> shift << (shift + 1)) | (pair & ((1 << shift) - 1)))
                    self._order(index, shift, bits, level)
            # 32 pairs are a run: all of a warp's are its own.
            run_extern("pi_meet_warp")

    def _order(self, index: Expr, shift: Expr, bits: Expr, level: Expr) -> None:
        """Swap two keys unless they are in the order of their sequence."""
        first = bind(_place(index, level))
        second = bind(first + (1 << shift))
        run_extern("pi_order", address(self._keys, first), address(self._keys, second), (index >> bits) & 1)


def _place(index: Expr, level: Expr) -> Expr:
    """Return the place of a key when every 2^level-th run is left."""
    return (index >> _RUN_BITS << (level + _RUN_BITS)) | (index & (RUN - 1))


# The logits of a row that a block takes: 64 to 128 such slices for vocabularies of 128 to 256 thousand tokens.
_SLICE = 2048
_LAST_ID = 2**31 - 1


@body(TopLogitsSpec)
def top_logits(spec: TopLogitsSpec, function: CudaFunction) -> None:
    """Write the launches of a `TopLogitsSpec`: search each slice, then merge their results."""
    logits, scores, ids, rows = function["logits"], function["scores"], function["ids"], spec.rows
    slices = blocks_for(spec.vocab, _SLICE)
    found = function.scratch("found", "int64", rows, slices * RUN)
    with function.launch(grid=(slices, rows), block=THREADS) as place, when(place.block_y < function.tokens(rows)):
        _search_slice(logits, found, spec.vocab, place)
    with function.launch(grid=rows, block=THREADS) as place, when(place.block < function.tokens(rows)):
        best = _merge_slices(found, slices, place)
        with when(place.thread < spec.count):
            token = bind(_LAST_ID - tirx.Cast("int32", best & _LAST_ID))
            scores[place.block, place.thread] = logits[place.block, token]
            ids[place.block, place.thread] = token


def _search_slice(logits: KernelTensor, found: KernelTensor, vocab: int, place: ThreadIndex) -> None:
    """found[row, 64 · block …] = the highest of a slice of the row, in order."""
    runs = SortedRuns.for_runs(blocks_for(min(vocab, _SLICE), RUN), place)
    tokens = [bind(place.block * _SLICE + index) for index in runs.indices]
    insides = [bind(token < vocab) for token in tokens]
    values = [
        bind(tirx.if_then_else(inside, logits[place.block_y, token], 0.0))
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
    """Return a number for a score and its token; a larger one comes earlier in the result."""
    order = tirx.Cast("int64", order_of(value)) * tirx.IntImm("int64", 2**32)
    return bind(tirx.Select(inside, order + tirx.Cast("int64", _LAST_ID - token), LOWEST))


def _merge_slices(found: KernelTensor, slices: int, place: ThreadIndex) -> Expr:
    """Return the key at a thread's place among the highest 64 of all slices of a row."""
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
