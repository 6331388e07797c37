"""Kernels that treat each token by itself, and the position and sequence of each row of a step.

A kernel that depends on positions is made for one mode of a step, see `specs.arguments.Mode`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, cycle

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix, each_group
from picompile_codegen.cpu.panel_rows import PanelRow
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, local, loop, parallel, select, when
from picompile_codegen.cpu.vector import LANES, at, blocks, compute, fma, load, splat, store, total
from picompile_codegen.specs import (
    AddSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    JoinColumnsSpec,
    LayerNormSpec,
    RmsNormSpec,
    RotarySpec,
    TakeLastSpec,
    TopLogitsSpec,
)
from picompile_codegen.specs.arguments import StepSpec
from picompile_passes.formats import GROUP


@dataclass(frozen=True)
class StepRows:
    """`count` rows; `position` and `slot` of a row."""

    count: Expr
    position: Callable[[Expr], Expr]
    slot: Callable[[Expr], Expr]


def step_rows(function: KernelFunction, spec: StepSpec) -> StepRows:
    """Read the rows of a step. A kernel of several launches calls this in each of them."""
    count = function.tokens(spec.rows)
    if spec.mode == "sequences":
        positions, slots = function["positions"], function.get("slots")
        return StepRows(count, lambda row: positions[row], lambda row: 0 if slots is None else slots[row])
    first, slot = function.position(spec.context), 0 if spec.sequences == 1 else function.slot(spec.sequences)
    return StepRows(count, lambda row: bind(first + row) if spec.mode == "chunk" else first, lambda _: slot)


@body(AddSpec)
def add(spec: AddSpec, function: KernelFunction) -> None:
    """Write the body of an `AddSpec`."""
    tokens = function.tokens(spec.rows)
    a, b, y = function["a"], function["b"], function["y"]
    with parallel(tokens, when_worth=spec.rows > 1) as t:

        def add_up(c: Expr, valid: int) -> None:
            store(y, t, c, value=load(a, t, c, valid=valid) + load(b, t, c, valid=valid), valid=valid)

        blocks(spec.dim, add_up)


@body(ElementwiseSpec)
def elementwise(spec: ElementwiseSpec, function: KernelFunction) -> None:
    """Write the body of an `ElementwiseSpec`."""
    y = function["y"]
    inputs = [(kind, function[f"x{number}"]) for number, kind in enumerate(spec.inputs)]
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t:
        # What has one number for a token, or for all, is the same in every block.
        fixed = {"t": lambda x: bind(splat(x[t, 0])), "n": lambda x: bind(splat(x[0]))}
        numbers = {index: fixed[kind](x) for index, (kind, x) in enumerate(inputs) if kind in fixed}

        def block(c: Expr, valid: int) -> None:
            values = [
                numbers[index] if index in numbers else load(x, *([t] if kind == "r" else []), c, valid=valid)
                for index, (kind, x) in enumerate(inputs)
            ]
            store(y, t, c, value=compute(spec.expression, values), valid=valid)

        blocks(spec.dim, block)


@body(TakeLastSpec)
def take_last(spec: TakeLastSpec, function: KernelFunction) -> None:
    """Write the body of a `TakeLastSpec`."""
    tokens = function.tokens(spec.rows)
    x, y = function["x"], function["y"]
    blocks(spec.dim, lambda c, valid: store(y, 0, c, value=load(x, tokens - 1, c, valid=valid), valid=valid))


@body(JoinColumnsSpec)
def join_columns(spec: JoinColumnsSpec, function: KernelFunction) -> None:
    """Write the body of a `JoinColumnsSpec`."""
    y, starts = function["y"], accumulate(spec.widths, initial=0)
    parts = [(function[f"x{number}"], start) for number, start in zip(range(len(spec.widths)), starts, strict=False)]
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t:
        for x, start in parts:
            _copy_columns(x, y, t, start)


def _copy_columns(x: KernelTensor, y: KernelTensor, t: Expr, start: int) -> None:
    blocks(x.columns, lambda c, valid: store(y, t, start + c, value=load(x, t, c, valid=valid), valid=valid))


@body(EmbeddingSpec)
def embedding(spec: EmbeddingSpec, function: KernelFunction) -> None:
    """Write the body of an `EmbeddingSpec`."""
    ids, w, y = function["ids"], KernelMatrix.argument(function, "w"), function["y"]
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t:
        number = bind(ids[t] + spec.offset)
        row = PanelRow(w, number) if spec.panels else w.row(number)

        def copy_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
            weights = row.group(group).weights()
            for i, valid in enumerate(lane_counts):
                store(y, t, group * GROUP + i * LANES, value=weights[i], valid=valid)

        each_group(spec.dim, copy_group)


# Norms of each token's activations.


# Independent sums, so that an addition need not wait for the one before.
_CHAINS = 4


@body(RmsNormSpec)
def rms_norm(spec: RmsNormSpec, function: KernelFunction) -> None:
    """Write the body of an `RmsNormSpec`."""
    x, weight, y, width = function["x"], function["weight"], function["y"], spec.dim // spec.groups
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t, _each_group(spec.groups, width) as start:
        mean_square = sum_row(x, token=t, start=start, width=width, term=lambda value: value * value) / float(width)
        factor = bind(splat(inverse_root(mean_square, spec.eps)))

        def scale(c: Expr, valid: int) -> None:
            value = load(x, t, start + c, valid=valid) * factor * load(weight, start + c, valid=valid)
            store(y, t, start + c, value=value, valid=valid)

        blocks(width, scale)


@contextmanager
def _each_group(groups: int, width: int) -> Iterator[Expr]:
    """Run the body for each group of a row with the column at which it begins: 0 where there is only one."""
    if groups == 1:
        yield 0
        return
    with loop(0, groups) as group:
        yield bind(group * width)


@body(LayerNormSpec)
def layer_norm(spec: LayerNormSpec, function: KernelFunction) -> None:
    """Write the body of a `LayerNormSpec`."""
    x, y, width = function["x"], function["y"], spec.dim // spec.groups
    weights, biases = function.get("weight"), function.get("bias")
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t, _each_group(spec.groups, width) as start:
        center = bind(sum_row(x, token=t, start=start, width=width, term=lambda value: value) / float(width))
        mean = bind(splat(center))
        squares = sum_row(
            x, token=t, start=start, width=width, term=lambda value: (value - mean) * (value - mean), fill=center
        )
        factor = bind(splat(inverse_root(squares / float(width), spec.eps)))

        def scale(c: Expr, valid: int) -> None:
            value = (load(x, t, start + c, valid=valid) - mean) * factor
            if weights is not None:
                value = value * load(weights, start + c, valid=valid)
            if biases is not None:
                value = value + load(biases, start + c, valid=valid)
            store(y, t, start + c, value=value, valid=valid)

        blocks(width, scale)


@body(DivideByRmsSpec)
def divide_by_rms(spec: DivideByRmsSpec, function: KernelFunction) -> None:
    """Write the body of a `DivideByRmsSpec`."""
    x, y, bias = function["x"], function["y"], function.get("bias")
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t:
        factor = bind(splat(inverse_root(x[t, spec.dim] / float(spec.neurons), spec.eps)))

        def scale(c: Expr, valid: int) -> None:
            value = load(x, t, c, valid=valid) * factor
            if bias is not None:
                value = value + load(bias, c, valid=valid)
            store(y, t, c, value=value, valid=valid)

        blocks(spec.dim, scale)


def inverse_root(value: Expr, eps: float) -> Expr:
    """1 / sqrt(value + eps), a float32."""
    return bind(1.0 / tirx.sqrt(value + eps))


def sum_row(
    x: KernelTensor, token: Expr, start: Expr, width: int, term: Callable[[Expr], Expr], fill: Expr = 0.0
) -> Expr:
    """Σ term(x[token, c]) over the `width` columns c from `start` on. Lanes past the end are `fill`, of term 0."""
    sums = local(_CHAINS * LANES)
    for chain in range(_CHAINS):
        sums[at(chain * LANES)] = splat(0.0)
    chains = cycle(range(_CHAINS))

    def add(c: Expr, valid: int) -> None:
        index = at(next(chains) * LANES)
        sums[index] = sums[index] + term(bind(load(x, token, start + c, valid=valid, fill=fill)))

    blocks(width, add, unroll=_CHAINS)
    first, second, third, fourth = (sums[at(chain * LANES)] for chain in range(_CHAINS))
    return total((first + second) + (third + fourth))


# Rotary position embedding.


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of the angles of each position, float32 [context, d/2]."""

    cos: KernelTensor
    sin: KernelTensor

    def turn(
        self, head: tuple[KernelTensor, Expr, Expr], position: Expr, emit: Callable[[Expr, Expr, int], None]
    ) -> None:
        """Turn `head`, which is x[row, start …], at `position`: `emit(column, value, valid)` gets the result, a vector
        at a time."""
        (x, row, start), half = head, self.cos.columns

        def turn(c: Expr, valid: int) -> None:
            a = bind(load(x, row, start + c, valid=valid))
            b = bind(load(x, row, start + half + c, valid=valid))
            cosine = bind(load(self.cos, position, c, valid=valid))
            sine = bind(load(self.sin, position, c, valid=valid))
            # Said outright: which product is rounded would else depend on the code around it.
            emit(c, fma(a, cosine, splat(0.0) - b * sine), valid)
            emit(c + half, fma(b, cosine, a * sine), valid)

        blocks(half, turn)


def angles_argument(function: KernelFunction) -> Angles | None:
    """Return the tables of a rotary embedding, or None in a variant of the kernel that has none."""
    cos, sin = function.get("cos"), function.get("sin")
    return None if cos is None or sin is None else Angles(cos, sin)


@body(RotarySpec)
def rotary(spec: RotarySpec, function: KernelFunction) -> None:
    """Write the body of a `RotarySpec`."""
    x, y, angles = function["x"], function["y"], Angles(function["cos"], function["sin"])
    tokens = step_rows(function, spec)
    with parallel(tokens.count, when_worth=spec.rows > 1) as t:
        position = bind(tokens.position(t))
        with loop(0, spec.heads) as head:
            start = head * spec.head_dim

            def emit(column: Expr, value: Expr, valid: int) -> None:
                store(y, t, start + column, value=value, valid=valid)

            angles.turn((x, t, start), position, emit)


# Top logits: the scores of a vocabulary that greedy and top-k sampling need.


# Bits of float32: all but the sign, and those of infinity.
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000


@body(TopLogitsSpec)
def top_logits(spec: TopLogitsSpec, function: KernelFunction) -> None:
    """Write the body of a `TopLogitsSpec`."""
    logits, scores, ids = function["logits"], function["scores"], function["ids"]
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as row:
        kept = _Kept(scores, ids, row)
        with loop(0, spec.count) as token:
            kept.insert(bind(logits[row, token]), token, token)
        with loop(spec.count, spec.vocab) as token:
            value = bind(logits[row, token])
            # A few hundred of many thousands are among the highest so far.
            with when(order_of(value) > order_of(bind(scores[row, spec.count - 1]))):
                kept.insert(value, token, spec.count - 1)


def order_of(value: Expr, lanes: int = 1) -> Expr:
    """Return an int32 that is larger for a larger float32, the same for both zeros, and largest for NaN."""
    bits = bind(tirx.reinterpret("int32" if lanes == 1 else f"int32x{lanes}", value))
    magnitude = bind(bits & MAGNITUDE)
    is_nan, most = magnitude > INFINITY, tirx.IntImm("int32", MAGNITUDE)
    most = most if lanes == 1 else tirx.Broadcast(most, lanes)
    return bind(select(is_nan, most, select(bits < 0, -magnitude, magnitude)))


class _Kept:
    """The highest scores of a row so far, in order."""

    def __init__(self, scores: KernelTensor, ids: KernelTensor, row: Expr) -> None:
        self._scores, self._ids, self._row = scores, ids, row
        self._place = local(1, dtype="int32")

    def insert(self, value: Expr, token: Expr, last: Expr) -> None:
        """Insert a score behind all that are no lower; those behind it move by one, to place `last` at most."""
        scores, ids, row, place = self._scores, self._ids, self._row, self._place
        order = order_of(value)
        place[0] = last
        with loop(0, last) as passed:
            other = bind(last - 1 - passed)
            moved = bind(scores[row, other])
            with when(order > order_of(moved)):
                scores[row, other + 1], ids[row, other + 1] = moved, ids[row, other]
                place[0] = other
        scores[row, place[0]], ids[row, place[0]] = value, token
