"""Outputs of parts of the positions are put together: y = Σ w_p · outputs_p over parts p.

w_p = exp(m_p - m) / Σ exp(m_p - m) · sum_p, with the largest m of the parts' maxima m_p.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.attention_work import LOWEST
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, when
from picompile_codegen.cuda.attention_common import THREADS, CudaAttentionTensors, Parts, padded_width, weight_of
from picompile_codegen.cuda.function import WARP, ThreadIndex
from picompile_codegen.cuda.memory import barrier, registers, shared, warp_max, warp_sum, zero_registers

# Columns of an output that a thread puts together: 16 bytes.
_COLUMNS = 4


@dataclass(frozen=True)
class MergedHeads:
    """The heads of a block: `count` of them from `first` on, of which `left` exist; of one row."""

    row: Expr
    first: Expr
    count: int
    left: Expr

    def head(self, number: Expr) -> Expr:
        """Return a head; past the last the last again."""
        return self.first + minimum(number, self.left - 1)


def merge_parts(
    tensors: CudaAttentionTensors, heads: MergedHeads, span: tuple[Expr, Expr], parts: Parts, *, place: ThreadIndex
) -> None:
    """Write y of `heads`, which the `THREADS` threads of a block share.

    `span` has the first part and the one behind the last.
    """
    merge = _Merge(tensors, heads, span, shared(heads.count, parts.count), place=place)
    merge.weigh_parts()
    barrier()
    if merge.sets > 1:
        merge.in_sets()
    else:
        merge.in_turns()


@dataclass(frozen=True)
class _Merge:
    """Sums of the outputs of parts times their weights: a thread has four columns of a head."""

    tensors: CudaAttentionTensors
    heads: MergedHeads
    span: tuple[Expr, Expr]
    weights: KernelTensor
    place: ThreadIndex

    @property
    def units(self) -> int:
        """Threads for the columns of a head."""
        return padded_width(self.tensors.spec.value_dim) // _COLUMNS

    @property
    def items(self) -> int:
        """Threads for all heads."""
        return self.heads.count * self.units

    @property
    def sets(self) -> int:
        """Sets of threads that take different parts, where there are threads to spare."""
        return max(1, THREADS // self.items)

    def weigh_parts(self) -> None:
        """weights[i, part] = w_p of the i-th head, by warp i."""
        tensors, heads, span, weights, place = self.tensors, self.heads, self.span, self.weights, self.place
        assert tensors.extremes is not None
        number = bind(minimum(place.warp, heads.count - 1))
        head = bind(heads.head(number))
        places = [bind(place.lane + first) for first in range(0, weights.columns, WARP)]
        insides = [bind(tirx.And(part >= span[0], part < span[1])) for part in places]
        extremes = [
            [
                bind(tirx.if_then_else(inside, tensors.extremes[heads.row, head, part, i], other))
                for i, other in ((0, LOWEST), (1, 0.0))
            ]
            for part, inside in zip(places, insides, strict=True)
        ]
        highest: Expr = LOWEST
        for of_part, _ in extremes:
            highest = tirx.Max(highest, of_part)
        of_all, found, own = warp_max(highest), registers(len(places)), 0.0
        for i, ((of_part, total), inside) in enumerate(zip(extremes, insides, strict=True)):
            found[i] = weight_of(inside, of_part, of_all)
            own = bind(own + found[i] * total)
        of_head = warp_sum(own)
        for i, (part, inside) in enumerate(zip(places, insides, strict=True)):
            with when(tirx.And(place.warp < heads.count, inside)):
                weights[number, part] = found[i] / of_head

    def in_turns(self) -> None:
        """Write the result, `THREADS` items at a time."""
        for first in range(0, self.items, THREADS):
            item = bind(first + self.place.thread)
            with when(item < self.items):
                sums = self._sums(item, 0)
                for i in range(_COLUMNS):
                    self._give(item, i, sums[i])

    def in_sets(self) -> None:
        """Write the result, which sets of threads share; their sums are added in order."""
        mine, item = bind(self.place.thread // self.items), bind(self.place.thread % self.items)
        sums = zero_registers(_COLUMNS)
        with when(mine < self.sets):
            found = self._sums(item, mine)
            for i in range(_COLUMNS):
                sums[i] = found[i]
        # TVM gives memory that nobody reads any more, here that of the weights, to what comes next.
        barrier()
        mixed = shared(self.sets, self.items * _COLUMNS)
        with when(mine < self.sets):
            for i in range(_COLUMNS):
                mixed[mine, item * _COLUMNS + i] = sums[i]
        barrier()
        with when(self.place.thread < self.items):
            for i in range(_COLUMNS):
                total = mixed[0, self.place.thread * _COLUMNS + i]
                for each in range(1, self.sets):
                    total = total + mixed[each, self.place.thread * _COLUMNS + i]
                self._give(self.place.thread, i, total)

    def _sums(self, item: Expr, mine: Expr) -> KernelTensor:
        """Return the sums of an item over the parts of set `mine`."""
        begin, end = self.span
        number, column = bind(item // self.units), bind(item % self.units * _COLUMNS)
        head, sums = bind(self.heads.head(number)), zero_registers(_COLUMNS)
        assert self.tensors.outputs is not None
        with loop(0, bind((end - begin + (self.sets - 1) - mine) // self.sets)) as turn:
            part = bind(begin + mine + turn * self.sets)
            weight = bind(self.weights[number, part])
            four = bind(self.tensors.outputs[self.heads.row, head, part, tirx.Ramp(column, 1, _COLUMNS)])
            for i in range(_COLUMNS):
                sums[i] = sums[i] + weight * tirx.Shuffle([four], [i])
        return sums

    def _give(self, item: Expr, i: int, value: Expr) -> None:
        number, column = item // self.units, bind(item % self.units * _COLUMNS + i)
        with when(tirx.And(number < self.heads.left, column < self.tensors.spec.value_dim)):
            self.tensors.y[self.heads.row, self.heads.head(number) * self.tensors.spec.value_dim + column] = value
