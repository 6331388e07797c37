"""Products of matrices by packed panels, as in BLIS: most of the work of reading a prompt.

A panel of weights is a part of a matrix, laid out for multiplication: for each column of a slice, the weights of all
outputs side by side. A panel of tokens has the inputs of eight tokens side by side, column by column. The sums of a
tile, a few tokens by a few vectors of outputs, stay in registers while a slice of columns goes by: for each column a
few loads of weights, and one of an input for each token. If an instruction set computes prompts in bfloat16, a word of
a panel holds two columns.

Weights are packed once for all tokens of a chunk, by the task that multiplies them; tokens once for all tasks. The
products of an output are added up in the order of the columns, whichever tokens share its tile.

Source: Van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality", ACM TOMS, 2015.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.bfloat16 import FUNCTIONS, dot_pairs_of_bfloat16, pair_words
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import each_group
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    local,
    local_vectors,
    loop,
    minimum,
    parallel,
    when,
)
from picompile_codegen.cpu.vector import LANES, at, fma, load, splat, store, transpose
from picompile_passes.formats import GROUP

PANEL_TOKENS = 8


@dataclass(frozen=True)
class RegisterTile:
    """The outputs that are computed in registers at a time: `tokens` by `vectors` of `lanes`."""

    tokens: int
    vectors: int
    lanes: int

    @property
    def outputs(self) -> int:
        """Outputs of a token."""
        return self.vectors * self.lanes

    def count(self, tokens: Expr) -> Expr:
        """Return how many tiles hold `tokens` tokens."""
        return (tokens + (self.tokens - 1)) // self.tokens


def float_tile() -> RegisterTile:
    """Return the tile of products of float32: its sums take three quarters of the registers."""
    chosen = isa.current()
    return RegisterTile(8 if chosen.registers >= 32 else 4, 3, chosen.wide_lanes)


def word_columns() -> int:
    """Return how many columns a word of a panel has: one of float32, or two of bfloat16."""
    return 2 if isa.current().prompts_in_bf16 else 1


def words_of(columns: Expr) -> Expr:
    """Return how many words hold `columns` columns, whole groups of 32."""
    return columns // word_columns()


@dataclass(frozen=True)
class TokenPanels:
    """Inputs of a chunk, packed: words `values` float32 [panels · columns, 8], zeros where columns are padding.

    Row p · `words_of(columns)` + w has word w of tokens 8 · p … 8 · p + 7. `columns` are whole groups of 32.
    """

    values: KernelTensor
    columns: int

    @classmethod
    def declare(cls, function: KernelFunction, name: str, rows: int, columns: int) -> "TokenPanels":
        """Declare memory for at most `rows` tokens, as `name`_panels, alike in all instruction sets."""
        padded = columns + -columns % GROUP
        panels = -(-rows // PANEL_TOKENS)
        return cls(function.scratch(f"{name}_panels", "float32", panels * padded, PANEL_TOKENS), padded)

    def pack(self, x: KernelTensor, tokens: Expr, columns: int) -> None:
        """Pack `tokens` rows of x float32 [rows, columns]. The last token stands in for those past the end."""
        with parallel((tokens + (PANEL_TOKENS - 1)) // PANEL_TOKENS) as panel:
            rows = [bind(minimum(panel * PANEL_TOKENS + i, tokens - 1)) for i in range(PANEL_TOKENS)]
            first = bind(panel * words_of(self.columns))

            def pack(group: Expr, lane_counts: tuple[int, ...]) -> None:
                packed = []
                for i, valid in enumerate(lane_counts):
                    packed += transpose([load(x, row, group * GROUP + i * LANES, valid=valid) for row in rows])
                packed += [splat(0.0)] * (GROUP - len(packed))
                for i, word in enumerate(packed if word_columns() == 1 else _paired(packed)):
                    self.values[first + group * words_of(GROUP) + i, at(0)] = word

            each_group(columns, pack)


def _paired(columns: list[Expr]) -> list[Expr]:
    """Return words of bfloat16 for each two of the columns, float32x8 each: two of these fill a vector of 16."""
    words = []
    for a, b, c, d in zip(*[iter(columns)] * 4, strict=True):
        found = pair_words(*wide([a, c, b, d], 2 * LANES))
        words += [_eight(found, start) for start in (0, LANES)]
    return words


def wide(parts: list[Expr], lanes: int) -> list[Expr]:
    """Join vectors of eight lanes to vectors of `lanes`, 8 or 16."""
    together = lanes // LANES
    if together == 1:
        return parts
    return [bind(tirx.Shuffle(parts[i : i + together], list(range(lanes)))) for i in range(0, len(parts), together)]


@dataclass(frozen=True)
class ChunkSums:
    """Sums of a task: vectors `values` [tokens, vectors] on the stack. Those of tokens past the end mean nothing."""

    values: KernelTensor
    vectors: int
    lanes: int

    @classmethod
    def zeros(cls, rows: int, tokens: Expr, outputs: int, lanes: int) -> "ChunkSums":
        """Return sums of `tokens` of at most `rows` tokens, for `outputs` outputs in vectors of `lanes`, all 0."""
        most, vectors = rows + -rows % PANEL_TOKENS, outputs // lanes
        sums = cls(local_vectors(most, vectors, lanes=lanes), vectors, lanes)
        with loop(0, minimum(tokens + (PANEL_TOKENS - 1), most)) as token, loop(0, vectors) as vector:
            sums.values[token, vector] = splat(0.0, lanes)
        return sums

    def emit(self, tokens: Expr, first: Expr, count: int, bias: KernelTensor | None, out: KernelTensor) -> None:
        """Store to out[token, `first` + i] the sums i of all tokens, with their biases, where `first` + i < `count`."""
        full = count // LANES * LANES
        is_whole = count % (self.vectors * self.lanes) == 0

        def put(token: Expr, output: Expr, value: Expr, valid: int) -> None:
            if bias is not None:
                value = value + load(bias, output, valid=valid)
            store(out, token, output, value=value, valid=valid)

        with loop(0, tokens) as token, loop(0, self.vectors) as vector:
            values = bind(self.values[token, vector])
            for start in range(0, self.lanes, LANES):
                output = bind(first + vector * self.lanes + start)
                value = values if self.lanes == LANES else _eight(values, start)
                if is_whole:
                    put(token, output, value, LANES)
                    continue
                with when(output < full):
                    put(token, output, value, LANES)
                if count > full:
                    with when(output == full):
                        put(token, output, value, count - full)


def _eight(vector: Expr, start: int) -> Expr:
    return bind(tirx.Shuffle([vector], list(range(start, start + LANES))))


def import_functions(function: KernelFunction) -> None:
    """Declare the functions that products of panels call, behind the declarations of a kernel."""
    if isa.current().prompts_in_bf16:
        function.import_llvm(FUNCTIONS)


def multiply_panels(
    weights: KernelTensor,
    x: TokenPanels,
    columns: tuple[Expr, Expr],
    tile: Expr,
    sums: ChunkSums,
    first_vector: Expr,
    fetch: Callable[[Expr], None],
) -> None:
    """Add the products of a slice of columns to the sums of a tile.

    Args:
        weights: a panel, vectors of words [words of the slice, vectors of outputs].
        x: the inputs.
        columns: the first column of the slice and how many it has, whole groups of 32.
        tile: which tokens.
        sums: what the products are added to.
        first_vector: the first vector of the tile in `weights` and in `sums`.
        fetch: `fetch(i)` prefetches something before the columns of group i of the slice.
    """
    shape, (start, count) = float_tile(), columns
    lanes, words = shape.lanes, words_of(GROUP)
    token = bind(tile * shape.tokens)
    panel = bind(token // PANEL_TOKENS)
    place, row = bind(token - panel * PANEL_TOKENS), bind(panel * words_of(x.columns) + words_of(start))
    places = [(t, v, t * shape.vectors + v) for t in range(shape.tokens) for v in range(shape.vectors)]
    registers = local(len(places), lanes)
    for t, v, i in places:
        registers[i, at(0, lanes)] = sums.values[token + t, first_vector + v]
    with loop(0, count // GROUP) as group:
        fetch(group)
        with loop(group * words, (group + 1) * words) as word:
            vectors = [bind(weights[word, first_vector + v]) for v in range(shape.vectors)]
            for t in range(shape.tokens):
                value = bind(splat(x.values[row + word, place + t], lanes))
                for v, vector in enumerate(vectors):
                    i = t * shape.vectors + v
                    registers[i, at(0, lanes)] = _add_product(registers[i, at(0, lanes)], vector, value, lanes)
    for t, v, i in places:
        sums.values[token + t, first_vector + v] = registers[i, at(0, lanes)]


def _add_product(sums: Expr, weights: Expr, values: Expr, lanes: int) -> Expr:
    if isa.current().prompts_in_bf16:
        return dot_pairs_of_bfloat16(sums, weights, values)
    return fma(weights, values, sums, lanes)
