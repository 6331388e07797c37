"""Slices of a feed-forward block's neurons, for one token or several, and their sum y.

A slice goes through its neurons a few at a time: products with gate and up, and the activation. Then, for neurons
whose output is not zero, four rows of down at a time, times their outputs, are added to the slice's own y
(`add_rows.py`). While rows are read, rows of later neurons are prefetched. If a limit may skip a neuron, its row
of down is prefetched only once its output is known to be above the limit; it arrives while neighbours are computed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.add_rows import BlockOrder, SomeRows, SumOrder, add_rows, rows_together
from picompile_codegen.cpu.dot import Vector
from picompile_codegen.cpu.ffn_neurons import FfnArguments, NeuronList
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import CACHE_LINE_BYTES
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    counter,
    local,
    loop,
    minimum,
    parallel,
    select,
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_experts import TokenExperts
from picompile_codegen.cpu.token_vectors import TokenVectors, each_tile
from picompile_codegen.cpu.vector import LANES, at, blocks, splat, store, zero_vector

# Columns of y that a task adds up, a multiple of every `BlockOrder.columns`, and where its parts begin.
_TASK_COLUMNS = 128


@dataclass(frozen=True)
class Slices:
    """y of some neurons each, float32 [slices, sums] in `order`, and how many of their h are not zero, int32 [slices].

    `squares` float32 [slices] are their sums of h², where these are asked for. Slices `per_token` · t … belong to token
    t.
    """

    y: KernelTensor
    nonzero: KernelTensor
    order: SumOrder
    per_token: int
    squares: KernelTensor | None = None

    @classmethod
    def declare(cls, function: KernelFunction, arguments: FfnArguments, per_token: int) -> "Slices":
        """Declare memory for `per_token` slices of every token."""
        order, count = SumOrder.of(arguments.bundle), arguments.spec.rows * per_token
        # A cache line more: the same columns of all slices would else compete for the same few places of a cache.
        width = order.width(arguments.spec.dim) + CACHE_LINE_BYTES // 4
        y = function.scratch("slices", "float32", count, width)
        nonzero = function.scratch("nonzero", "int32", count)
        squares = function.scratch("squares", "float32", count) if arguments.spec.squares else None
        return cls(y, nonzero, order, per_token, squares)

    def clear(self, index: Expr, dim: int) -> None:
        """Set the sums of slice `index` to 0."""
        blocks(self.order.width(dim), lambda c, valid: store(self.y, index, c, value=splat(0.0), valid=valid))
        self.nonzero[index] = 0
        if self.squares is not None:
            self.squares[index] = 0.0

    def add_up(self, y: KernelTensor, bias: KernelTensor | None, dim: int, tokens: Expr) -> None:
        """Add up y [rows, dim] of each token: its slices, in order, and the bias."""
        tasks = -(-dim // _TASK_COLUMNS)

        def add_vector(token: Expr, first: Expr, runs: list[tuple[Expr, int, int]]) -> None:
            value = zero_vector()
            with loop(0, self.per_token) as index:
                value[at(0)] = value[at(0)] + self.y[token * self.per_token + index, at(first)]
            summed = bind(value[at(0)])
            for column, lane, count in runs:
                _store(y, token, column, sums=summed, lane=lane, count=count, bias=bias)

        def add_columns(order: BlockOrder, token: Expr, start: Expr, columns: int) -> None:
            order.each(
                columns,
                lambda position, runs: add_vector(
                    token, start + position, [(start + column, lane, count) for column, lane, count in runs]
                ),
            )

        with parallel(tokens * tasks, when_worth=worth_a_region(self.per_token * dim * 4)) as index:
            token = bind(index // tasks)
            task = bind(index - token * tasks)
            for first, end, order in self.order.each_part(dim):
                begin, (full, rest) = first // _TASK_COLUMNS, divmod(end, _TASK_COLUMNS)
                if full > begin:
                    with when(tirx.And(task >= begin, task < full)):
                        add_columns(order, token, bind(task * _TASK_COLUMNS), _TASK_COLUMNS)
                if rest:
                    with when(task == full):
                        add_columns(order, token, full * _TASK_COLUMNS, rest)

    def add_up_squares(self, y: KernelTensor, column: int, tokens: Expr) -> None:
        """Add up the sums of h² of each token's slices, in order, to a column of y, if they were asked for."""
        if self.squares is None:
            return
        total = local(1)
        with loop(0, tokens) as token:
            total[0] = 0.0
            with loop(0, self.per_token) as index:
                total[0] = total[0] + self.squares[token * self.per_token + index]
            y[token, column] = total[0]

    def count(self, stats: KernelTensor, computed: Expr, tokens: Expr) -> None:
        """Add to `stats` how many neurons were computed and how many were not zero."""
        stats[0] = stats[0] + tirx.Cast("int64", computed)
        with loop(0, tokens * self.per_token) as index:
            stats[1] = stats[1] + tirx.Cast("int64", self.nonzero[index])


def _store(
    y: KernelTensor, token: Expr, column: Expr, sums: Expr, lane: int, count: int, bias: KernelTensor | None
) -> None:
    """Store `count` sums, from lane `lane` on, to consecutive columns."""
    lanes = list(range(lane, lane + count))
    if count in (LANES, LANES // 2):
        value = tirx.Shuffle([sums], lanes)
        y[token, at(column, count)] = value if bias is None else value + bias[at(column, count)]
        return
    for i, number in enumerate(lanes):
        value = tirx.Shuffle([sums], [number])
        y[token, column + i] = value if bias is None else value + bias[column + i]


# Neurons whose products are computed before their rows of down are added: these rows wait in the cache meanwhile.
_NEURONS_TOGETHER = 16


@dataclass(frozen=True)
class _Waiting:
    """Neurons whose rows of down are to be added: `count[0]` of them, their rows' numbers and each token's outputs.

    numbers int32 [places], outputs float32 [tokens, places].
    """

    numbers: KernelTensor
    outputs: KernelTensor
    count: KernelTensor

    @classmethod
    def declare(cls, arguments: FfnArguments, tokens: int) -> "_Waiting":
        """Declare memory for the neurons that wait, none at first."""
        # Some are left over before more come, and `_fill_up` writes as many behind them.
        places = _NEURONS_TOGETHER + 2 * (rows_together(arguments.bundle)[-1] - 1)
        return cls(local(places, dtype="int32"), local(tokens, places), counter())


@dataclass(frozen=True)
class _Neuron:
    """A neuron, its place (see `ffn_neurons.py`), and its expert's gain in a block of experts."""

    number: Expr
    place: Expr
    gain: Expr | None = None


@dataclass(frozen=True)
class _Order:
    """The neurons that a token computes, in order: those listed, or all of the block or of the token's experts."""

    listed: NeuronList | None
    experts: TokenExperts | None

    def count(self, neurons: int) -> Expr:
        """Return how many there are, in a block of `neurons`."""
        if self.listed is not None:
            return self.listed.count
        return neurons if self.experts is None else bind(self.experts.neurons)

    def number(self, position: Expr) -> Expr:
        """Return the number of a neuron by its position."""
        return self._number(self._place(position))

    def neuron(self, position: Expr) -> _Neuron:
        """Return a neuron by its position."""
        place = self._place(position)
        return _Neuron(self._number(place), place, None if self.experts is None else self.experts.gain(place))

    def _place(self, position: Expr) -> Expr:
        return bind(position if self.listed is None else self.listed.place(position))

    def _number(self, place: Expr) -> Expr:
        return place if self.experts is None else bind(self.experts.neuron(place))


def compute_slice(
    arguments: FfnArguments,
    vector: Vector,
    listed: NeuronList | None,
    slices: Slices,
    index: Expr,
    number: Expr,
    experts: TokenExperts | None = None,
) -> None:
    """Compute slice `number` of one token, over all neurons or those listed, to row `index` of `slices`.

    In a block of experts, `experts` are those of the token.
    """
    slices.clear(index, arguments.spec.dim)
    of, waiting, order = slices.per_token, _Waiting.declare(arguments, 1), _Order(listed, experts)
    count = order.count(arguments.spec.neurons)
    start, stop = bind(count * number // of), bind(count * (number + 1) // of)
    sure_parts = _sure_parts(arguments, listed)
    bundle = arguments.bundle
    rows_ahead = bundle.rows_ahead if listed is None else bundle.scattered_rows_ahead
    distance = -(-rows_ahead // max(len(sure_parts), 1))
    with loop(start, minimum(start + distance, stop)) as position:
        rows = arguments.bundle_rows(order.number(position))
        for part in sure_parts:
            arguments.bundle.fetch_row(rows[part])
    parts = bind((stop - start + (_NEURONS_TOGETHER - 1)) // _NEURONS_TOGETHER)
    with loop(0, parts) as part:
        first = bind(start + part * _NEURONS_TOGETHER)
        with loop(first, minimum(first + _NEURONS_TOGETHER, stop)) as position:
            _compute(
                arguments,
                vectors=[vector],
                listed=listed,
                neuron=order.neuron(position),
                ahead=order.number(minimum(position + distance, count - 1)),
                waiting=waiting,
                slices=slices,
                indices=[index],
            )
        with when(part == parts - 1):
            _fill_up(waiting, rows_together(arguments.bundle)[-1])
        following = bind(first + _NEURONS_TOGETHER)

        def next_neuron(i: Expr) -> Expr:
            return order.number(minimum(following + i, count - 1))

        known = None if _adds_some(arguments, listed) else next_neuron
        _add_waiting(arguments, waiting, out=slices.y, indices=[index], following=known)


def compute_dense_slice(
    arguments: FfnArguments, vectors: TokenVectors, first: Expr, stop: Expr, slices: Slices, number: Expr
) -> None:
    """Compute slice `number` of the tokens from `first` to `stop` - 1 over all neurons, each as `compute_slice` does.

    A few neurons' rows are used for all tokens, tile by tile, before the next ones are read.
    """
    of, neurons = slices.per_token, arguments.spec.neurons
    with loop(first, stop) as token:
        slices.clear(token * of + number, arguments.spec.dim)
    begin, end = bind(neurons * number // of), bind(neurons * (number + 1) // of)
    distance = -(-arguments.bundle.rows_ahead // arguments.spec.bundle_parts)
    parts = bind((end - begin + (_NEURONS_TOGETHER - 1)) // _NEURONS_TOGETHER)
    with loop(0, parts) as part:
        start = bind(begin + part * _NEURONS_TOGETHER)
        following = bind(minimum(start + _NEURONS_TOGETHER, end))

        def compute(tokens: list[Expr]) -> None:
            indices = [bind(token * of + number) for token in tokens]
            waiting = _Waiting.declare(arguments, len(tokens))
            with loop(start, following) as neuron:
                ahead = bind(minimum(neuron + distance, neurons - 1))
                inputs = [vectors[token] for token in tokens]
                _compute(
                    arguments,
                    vectors=inputs,
                    listed=None,
                    neuron=_Neuron(bind(neuron), neuron),
                    ahead=ahead,
                    waiting=waiting,
                    slices=slices,
                    indices=indices,
                )
            with when(part == parts - 1):
                _fill_up(waiting, rows_together(arguments.bundle)[-1])
            _add_waiting(
                arguments,
                waiting,
                out=slices.y,
                indices=indices,
                following=lambda i: bind(minimum(following + i, neurons - 1)),
            )

        each_tile(first, stop, compute)


def _compute(
    arguments: FfnArguments,
    vectors: list[Vector],
    listed: NeuronList | None,
    neuron: _Neuron,
    ahead: Expr,
    waiting: _Waiting,
    slices: Slices,
    indices: list[Expr],
) -> None:
    """Compute one neuron's output for each of `vectors`, and add it to those that wait.

    A listed neuron has one vector, and is added only if its output is not zero.
    """
    if listed is not None and listed.outputs is not None:
        output = bind(listed.outputs[listed.row, neuron.place])
        _wait(arguments, listed, neuron, outputs=[output], waiting=waiting, slices=slices, indices=indices)
        return
    known = None if listed is None else listed.product(neuron.place)
    firsts = arguments.first_products(neuron.number, vectors, ahead) if known is None else [known]
    with _unless_silent(arguments, listed, neuron.number, firsts[0]):
        ups = arguments.up_products(neuron.number, vectors, ahead)
        outputs = [arguments.output_of_one(first, up) for first, up in zip(firsts, ups, strict=True)]
        _wait(arguments, listed, neuron, outputs, waiting, slices, indices)


def _wait(
    arguments: FfnArguments,
    listed: NeuronList | None,
    neuron: _Neuron,
    outputs: list[Expr],
    waiting: _Waiting,
    slices: Slices,
    indices: list[Expr],
) -> None:
    """Add a neuron's outputs to those that wait."""
    spec, down = arguments.spec, bind(arguments.down_row(neuron.number))
    place, fired = bind(waiting.count[0]), 1
    for i, (h, index) in enumerate(zip(outputs, indices, strict=True)):
        fired = bind(_is_kept(arguments, neuron.number, h))
        slices.nonzero[index] = slices.nonzero[index] + fired
        if slices.squares is not None:
            square = h * h if arguments.output_limits is None else select(fired != 0, h * h, tirx.const(0.0, "float32"))
            slices.squares[index] = slices.squares[index] + square
        waiting.outputs[i, place] = h if neuron.gain is None else h * neuron.gain
    waiting.numbers[place] = down
    # Without a list rows are added even where h is zero: leaving out a few would break the stream of reads.
    waiting.count[0] = place + (1 if listed is None and not spec.has_limits else fired)
    if _adds_some(arguments, listed):
        with when(fired != 0):
            arguments.bundle.fetch_row(down)


def _adds_some(arguments: FfnArguments, listed: NeuronList | None) -> bool:
    """Return whether limits may keep the down row of a neuron, listed or any, from being added."""
    return arguments.spec.output_limits or _leaves_early(arguments, listed)


def _leaves_early(arguments: FfnArguments, listed: NeuronList | None) -> bool:
    """Return whether a neuron may turn out to be below the limit of its gate, which no list has told before."""
    return arguments.spec.gate_limits and (listed is None or listed.products is None)


def _sure_parts(arguments: FfnArguments, listed: NeuronList | None) -> range:
    """Return which of a neuron's rows in the bundle are read whatever its limits leave out, or behind its output."""
    parts = arguments.spec.bundle_parts
    if listed is not None and listed.outputs is not None:
        return range(parts - 1, parts)
    # Where the gate is in the bundle, its product may be known.
    first = int(listed is not None and listed.products is not None and arguments.decide is None)
    return range(first, 1 if _leaves_early(arguments, listed) else parts - arguments.spec.output_limits)


def _is_kept(arguments: FfnArguments, neuron: Expr, h: Expr) -> Expr:
    """Return 1 if an output is not zero or, where it has a limit, not within that; else 0."""
    if arguments.output_limits is None:
        return tirx.Cast("int32", h != 0.0)
    # What is not a number is kept, so that it shows. TVM would make `not h <= limit` to `limit < h`.
    return select(tirx.abs(h) <= arguments.output_limits[neuron], 0, 1)


def _unless_silent(
    arguments: FfnArguments, listed: NeuronList | None, neuron: Expr, first: Expr
) -> AbstractContextManager[None]:
    """Skip the rest of a neuron below the limit of its gate, and of one that a mask names and that is silent."""
    if arguments.gate_limits is not None and _leaves_early(arguments, listed):
        return when(arguments.is_above_gate_limit(first, arguments.gate_limits, neuron))
    if listed is None or listed.products is not None or not arguments.spec.is_sparse:
        return nullcontext()
    return when(first > arguments.spec.threshold)


def _fill_up(waiting: _Waiting, together: int) -> None:
    """Fill up those that wait to a multiple of `together` by the first one, times zero."""
    count = bind(waiting.count[0])
    for i in range(together - 1):
        waiting.numbers[count + i] = waiting.numbers[0]
        for token in range(waiting.outputs.rows):
            waiting.outputs[token, count + i] = 0.0
    waiting.count[0] = (count + (together - 1)) // together * together


def _add_waiting(
    arguments: FfnArguments,
    waiting: _Waiting,
    out: KernelTensor,
    indices: list[Expr],
    following: Callable[[Expr], Expr] | None,
) -> None:
    """Add the rows of down that wait, as many at a time as possible; a few remain, and move to the front.

    Meanwhile the rows of down of the neurons `following(0)`, `following(1)`, … are fetched, if they are known.
    """
    done, numbers_of_rows = counter(), rows_together(arguments.bundle)
    for together in numbers_of_rows:
        first = bind(done[0])
        times = bind((waiting.count[0] - first) // together)
        with loop(0, times) as time:
            places = [bind(first + time * together + i) for i in range(together)]
            numbers = [bind(waiting.numbers[place]) for place in places]
            outputs = [[bind(waiting.outputs[i, place]) for place in places] for i in range(len(indices))]
            ahead = [] if following is None else [bind(arguments.down_row(following(place))) for place in places]
            add_rows(SomeRows(arguments.bundle, numbers, factors=outputs, out=out, indices=indices, ahead=ahead))
        done[0] = first + times * together
    left = bind(done[0])
    for i in range(numbers_of_rows[-1] - 1):
        waiting.numbers[i] = waiting.numbers[left + i]
        for token in range(len(indices)):
            waiting.outputs[token, i] = waiting.outputs[token, left + i]
    waiting.count[0] = waiting.count[0] - left
