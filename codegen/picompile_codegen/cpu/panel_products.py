"""Products of a matrix in panels with the quantized activations of any number of tokens.

A task takes a panel: sixteen rows, whose codes lie side by side (`formats/panels.py`). A vector has four codes of each
row, a row in each lane. It is multiplied with four bytes of a token, the same in each lane, and added to the sums.
Within a group of 32 columns these are integers; then they are scaled and added up in float32, group after group. So an
output has the same bits whichever tokens are multiplied beside it, one or a chunk of them.

Activations have one byte each, or two for products that are as good as those of floats: then the codes are multiplied
with both, and the sums are joined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.byte_tiles import QUADS, ByteInputs, byte_lanes, four_bytes, quads_in_words
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_floats import FloatGroup, FloatInputs, product_unit
from picompile_codegen.cpu.panel_matrix import GroupPlace, PanelMatrix
from picompile_codegen.cpu.quantized import (
    QuantizedRows,
    add_neighbours,
    dot_signed,
    dot_unsigned,
    joined_sums,
    multiply_pairs,
)
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    local_vectors,
    loop,
    minimum,
    parallel,
    when,
    worth_a_region,
)
from picompile_codegen.cpu.token_vectors import each_row
from picompile_codegen.cpu.vector import fma, splat, to_floats
from picompile_passes.formats import GROUP, PANEL_ROWS

# Tokens that codes are decoded for at a time. Their sums lie in the first-level cache.
TILE = 32
# Sums of the products of a group of columns, for each row of a vector: instructions that add to the same sum wait for
# one another, and a processor can look past so many alone.
_CHAINS = 2


# Computes something of outputs `output` … `output` + lanes - 1 of a token, given their products: emit(token, output,
# lanes, products).
Emit = Callable[[Expr, Expr, int, Expr], None]


def _same(place: Expr) -> Any:
    return place


@dataclass(frozen=True)
class TokenRun:
    """`count` consecutive tokens from `first` on; the inputs of token i are in row `row_of(i)`.

    A `count` of 1 that is known here is a kernel of its own, with the sums of all rows of a panel in registers.
    """

    count: Expr
    first: Expr = 0
    row_of: Callable[[Expr], Expr] = _same


# Inputs of products with panels: bytes, or floats where codes stand for floats.
PanelInputs = ByteInputs | FloatInputs


def panel_inputs(
    function: KernelFunction, name: str, rows: int, columns: int, matrix: KernelMatrix, parts: int = 1
) -> PanelInputs:
    """Declare memory for the inputs of `rows` tokens, for products with `matrix`, or any like it.

    Where they become bytes, each has `parts` of them.
    """
    if matrix.form.has_floats:
        return FloatInputs.declare(function, name, rows, columns, matrix)
    return ByteInputs.declare(function, name, rows, columns, matrix, parts)


def quantize_tokens(x: KernelTensor, tokens: Expr, columns: int, inputs: PanelInputs) -> None:
    """Take in the first `tokens` rows of x float32 [rows, columns]."""
    if x.rows == 1:
        inputs.quantize(x, 0, columns)
        return
    each_row(tokens, lambda token: inputs.quantize(x, token, columns))


def multiply_in_panels(matrix: KernelMatrix, inputs: PanelInputs, tokens: Expr, emit: Emit) -> None:
    """Multiply `tokens` tokens with a matrix in panels; `emit` takes the products, those of a vector at a time."""
    panels = PanelMatrix(matrix)
    count = panels_of_task(panels.panels, inputs.capacity)
    with parallel(panels.panels // count, when_worth=worth_a_region(matrix.bytes)) as task:
        first = task if count == 1 else bind(task * count)
        multiply_panel(panels, (first, count), inputs, TokenRun(tokens), emit, behind=(panels, first + count))


def panels_of_task(panels: int, rows: int) -> int:
    """Return how many panels of so many a task takes for up to `rows` tokens: those whose rows share a vector's bytes.

    A vector of bytes is read once for all of them, or else reading is what several tokens wait for.
    """
    count = 2 if byte_lanes() == PANEL_ROWS and rows > 1 else 1
    return 1 if panels % count else count


def multiply_panel(
    panels: PanelMatrix,
    taken: tuple[Expr, int],
    inputs: PanelInputs,
    run: TokenRun,
    emit: Emit,
    behind: tuple[PanelMatrix, Expr],
) -> None:
    """Multiply a run of tokens with panels (first, count), while as many from the one `behind` them are fetched."""
    task = _Task(panels, *taken, inputs, run, emit, behind)
    if isinstance(run.count, int) and run.count == 1:
        task.multiply_tile(0, 1)
        return
    with loop(0, (run.count + (TILE - 1)) // TILE) as tile:
        first = bind(tile * TILE)
        task.multiply_tile(first, bind(minimum(run.count - first, TILE)))


@dataclass(frozen=True)
class _Task:
    """The products of `count` panels from `panel` on with inputs of `run`; what is multiplied next lies in `behind`."""

    panels: PanelMatrix
    panel: Expr
    count: int
    inputs: PanelInputs
    run: TokenRun
    emit: Emit
    behind: tuple[PanelMatrix, Expr]

    def multiply_tile(self, first: Expr, count: Expr) -> None:
        """Compute the outputs of the panels for `count` tokens of the run from its `first` on, at most `TILE`."""
        vectors = [(i, lane) for i in range(self.count) for lane in range(0, PANEL_ROWS, byte_lanes())]
        # One token leaves registers for the sums of all rows. So a panel is read front to back only once.
        together = len(vectors) if isinstance(count, int) else self.count
        for start in range(0, len(vectors), together):
            self._multiply_rows(vectors[start : start + together], first, count)

    def _multiply_rows(self, vectors: list[tuple[int, int]], first: Expr, count: Expr) -> None:
        """Compute the outputs of some rows for a tile; each of `vectors` is the number of a panel and its first row."""
        lanes = byte_lanes()
        tokens = 1 if isinstance(count, int) else TILE
        sums = local_vectors(tokens, len(vectors), lanes=lanes)

        def clear(t: Expr) -> None:
            for number in range(len(vectors)):
                sums[t, number] = splat(0.0, lanes)

        def add(place: GroupPlace) -> None:
            if vectors[0] == (0, 0):
                # The first tokens to be multiplied with a panel have the next one fetched.
                self._fetch(place.group, first)
            self._add_group(place, vectors, (first, count), sums)

        def finish(t: Expr) -> None:
            for number, (i, lane) in enumerate(vectors):
                products = bind(sums[t, number])
                self.emit(self._token(first + t), bind((self.panel + i) * PANEL_ROWS + lane), lanes, products)

        _each_token(count, clear)
        self._each_group(count, add)
        _each_token(count, finish)

    def _token(self, place: Expr) -> Expr:
        """Return the number of a token, given its place in the run."""
        return place if isinstance(self.run.first, int) and self.run.first == 0 else self.run.first + place

    def _row(self, place: Expr) -> Expr:
        """Return the row of inputs of a token, given its place in the run."""
        row = self.run.row_of(self._token(place))
        return row if isinstance(row, int) else bind(row)

    def _fetch(self, group: Expr, first: Expr) -> None:
        panels, panel = self.behind

        def fetch() -> None:
            for i in range(self.count):
                panels.fetch(panel + i, group, self.panels.matrix.groups)

        if isinstance(first, int):
            fetch()
            return
        with when(first == 0):
            fetch()

    def _each_group(self, tokens: Expr, body: Callable[[GroupPlace], None]) -> None:
        """Run `body` for all groups, in order: for one token several in turn, since unpacking is most of its work."""
        groups, together = self.panels.matrix.groups, self.panels.groups_in_turn
        whole = groups // together if together > 1 and isinstance(tokens, int) else 0
        if whole:
            with loop(0, whole) as index:
                for number in range(together):
                    body(GroupPlace(index, together, number))
        if whole * together < groups:
            with loop(whole * together, groups) as group:
                body(GroupPlace(group))

    def _add_group(
        self, place: GroupPlace, vectors: list[tuple[int, int]], tile: tuple[Expr, Expr], sums: KernelTensor
    ) -> None:
        """Add the products of a group of columns to the sums of all tokens of a tile."""
        if isinstance(self.inputs, FloatInputs):
            self._add_floats(place, vectors, tile, self.inputs.values, sums)
            return
        panels, x, (first, count), lanes = self.panels, self.inputs.rows, tile, byte_lanes()
        group, each = bind(place.group), QUADS // panels.scale_groups
        codes = [panels.codes(self.panel + i, place, lane) for i, lane in vectors]
        scales, shifts = [], []
        for number in range(panels.scale_groups):
            found = [panels.scales(self.panel + i, group, number, lane) for i, lane in vectors]
            scales.append(found)
            if panels.matrix.has_zeros:
                shifts.append(
                    [
                        panels.shifts(self.panel + i, group, number, lane, scale)
                        for (i, lane), scale in zip(vectors, found, strict=True)
                    ]
                )

        def add(t: Expr) -> None:
            token = self._row(first + t)
            scale_x = bind(splat(x.scales[token, group], lanes))
            for number in range(panels.scale_groups):
                quads, column = range(number * each, (number + 1) * each), bind(group * panels.scale_groups + number)
                start = None if shifts else bind(tirx.Broadcast(x.offsets[token, column], lanes))
                products = self._dots(
                    x, [[of_row[quad] for quad in quads] for of_row in codes], token, group, quads, start
                )
                for row, product in enumerate(products):
                    scale = bind(scales[number][row] * scale_x)
                    total = fma(to_floats(product, lanes), scale, sums[t, row], lanes)
                    if shifts:
                        total = fma(shifts[number][row], splat(x.offsets[token, column], lanes), total, lanes)
                    sums[t, row] = total

        _each_token(count, add)

    def _add_floats(
        self,
        place: GroupPlace,
        vectors: list[tuple[int, int]],
        tile: tuple[Expr, Expr],
        x: KernelTensor,
        sums: KernelTensor,
    ) -> None:
        """Add the products of a group of columns, as `_add_group` does, where codes stand for floats."""
        panels, (first, count), lanes = self.panels, tile, byte_lanes()
        group, unit = bind(place.group), splat(product_unit(panels.matrix.form), lanes)
        scales = [bind(panels.scales(self.panel + i, group, 0, lane) * unit) for i, lane in vectors]
        numbers = [panels.numbers(self.panel + i, place, lane) for i, lane in vectors]
        products = FloatGroup(numbers, bind(group * GROUP), lanes)

        def add(token: Expr, row: int, total: Expr) -> None:
            sums[token, row] = fma(total, scales[row], sums[token, row], lanes)

        if isinstance(count, int):
            products.multiply(x, self._row(0), add)
        else:
            products.multiply_all(x, lambda token: self._row(first + token), count, add)

    def _dots(
        self,
        x: QuantizedRows,
        codes: list[list[Expr]],
        token: Expr,
        group: Expr,
        quads: range,
        start: Expr | None,
    ) -> list[Expr]:
        """Return start + Σ of codes · activations of some of a group's columns for some rows, int32 of each lane.

        Sums of each row, and of high and of low bytes, do not wait for one another.
        """
        lanes, is_unsigned = byte_lanes(), self.panels.is_unsigned
        parts = range(x.parts)
        starts = [start if part + 1 == x.parts else None for part in parts]
        values = [[four_bytes(x, token, group, quad, lanes, part) for quad in quads] for part in parts]
        if isa.current().bytes_dot == "maddubs" and is_unsigned:
            largest = self.panels.matrix.largest_raw
            sums = [
                [_dot_in_words(largest, of_row, of_part, begin) for of_row in codes]
                for of_part, begin in zip(values, starts, strict=True)
            ]
        else:
            dot = dot_unsigned if is_unsigned else dot_signed
            sums = [
                _dot_in_chains(dot, codes, (of_part, begin), lanes)
                for of_part, begin in zip(values, starts, strict=True)
            ]
        if x.parts == 1:
            return sums[0]
        return [joined_sums(high, low, lanes) for high, low in zip(*sums, strict=True)]


def _each_token(count: Expr, body: Callable[[Expr], None]) -> None:
    """Run `body` for each token of a tile."""
    if isinstance(count, int):
        for token in range(count):
            body(token)
        return
    with loop(0, count) as token:
        body(token)


def _dot_in_chains(
    dot: Callable[..., Expr],
    codes: list[list[Expr]],
    added: tuple[list[Expr], Expr | None],
    lanes: int,
) -> list[Expr]:
    """Return start + Σ of codes · values for each row, added up in `_CHAINS` sums; `added` are the values and start."""
    values, start = added
    each = len(values) // _CHAINS
    sums: list[list[Expr]] = []
    for of_row in codes:
        parts = []
        for chain in range(_CHAINS):
            total = None if chain else start
            for quad in range(chain * each, (chain + 1) * each):
                total = dot(of_row[quad], values[quad], total, lanes)
            parts.append(total)
        sums.append(parts)
    return [reduce(lambda a, b: bind(a + b), parts) for parts in sums]


def _dot_in_words(largest: int, codes: list[Expr], values: list[Expr], total: Expr | None) -> Expr:
    """Add up as many products as fit 16 bits before they are added in 32."""
    most = quads_in_words(largest)
    for first in range(0, len(codes), most):
        words = multiply_pairs(codes[first], values[first])
        for i in range(first + 1, min(first + most, len(codes))):
            words = bind(words + multiply_pairs(codes[i], values[i]))
        summed = add_neighbours(words)
        total = summed if total is None else bind(total + summed)
    return total
