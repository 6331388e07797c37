"""Products of many tokens on tensor cores, by tiles of results, with both factors in a block's shared memory.

A block goes through its factors 32 columns at a time, a step. While a step is multiplied, the activations of the next
one are copied to other memory, and its weights are read into registers (or copied, where they are halves). Which
elements of a matrix each lane has is written down in `instructions.cuh`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, minimum, when
from picompile_codegen.cuda.function import ThreadIndex
from picompile_codegen.cuda.halves import Halves
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import address, barrier, place_in, registers, run_extern, shared, zero_registers
from picompile_codegen.cuda.weight_pieces import PIECE, RUN, WeightPiece, copy_run, piece_registers, run_starts
from picompile_passes.formats import GROUP

# Columns of a step: a group of the formats.
STEP = GROUP
# An `mma` multiplies 16 columns of 16 tokens by 8 outputs; a lane has four of the results.
_DEPTH, _TOKENS, _OUTPUTS, _RESULTS = 16, 16, 8, 4
_TURNS = STEP // _DEPTH
WARP_OUTPUTS = 32
_STAGES = 2
_HALVES_A_WORD = 2
_RUN_WORDS = RUN // _HALVES_A_WORD
# Rows of a step have 16 bytes more than they need, so that the 16 bytes of eight rows lie in different banks.
_ROW_WORDS = STEP // _HALVES_A_WORD + _RUN_WORDS


@dataclass(frozen=True)
class ProductTile:
    """The results of a block: `tokens` by `outputs`, of which a warp has `warp_tokens` by 32.

    `resident` is as in `function.Grid`.
    """

    tokens: int
    outputs: int
    warp_tokens: int
    resident: int | str

    @property
    def threads(self) -> int:
        """Threads of the block: one for each piece of weights of a step."""
        return self.outputs * STEP // PIECE

    @property
    def token_fragments(self) -> int:
        """The number of fragments of 16 tokens that a warp has."""
        return self.warp_tokens // _TOKENS

    @property
    def output_fragments(self) -> int:
        """The number of fragments of 8 outputs that a warp has."""
        return WARP_OUTPUTS // _OUTPUTS

    def warp_token(self, place: ThreadIndex) -> Expr:
        """Return the first token of a warp in the tile."""
        return place.warp // (self.outputs // WARP_OUTPUTS) * self.warp_tokens

    def warp_output(self, place: ThreadIndex) -> Expr:
        """Return the first output of a warp in the tile."""
        return place.warp % (self.outputs // WARP_OUTPUTS) * WARP_OUTPUTS


# Two blocks keep the tensor cores busy where one waits at a barrier.
LARGE, SMALL = ProductTile(128, 128, 64, resident="PI_LARGE_TILES"), ProductTile(64, 64, 32, resident=4)
# So many blocks of the large tile keep a GPU busy.
_ENOUGH_BLOCKS = 128


def tile_for(rows: int, outputs: int) -> ProductTile:
    """Return the tile for products of `rows` tokens that have so many outputs."""
    blocks = -(-rows // LARGE.tokens) * -(-outputs // LARGE.outputs)
    return LARGE if blocks >= _ENOUGH_BLOCKS else SMALL


class Weights(Protocol):
    """The right factor of a tile, at two stages in the memory of the block."""

    def start(self, step: Expr, stage: Expr) -> None:
        """Begin to fetch the weights of a step, which are to lie at `stage`."""

    def finish(self, stage: Expr) -> None:
        """Store what has been read for the step that was begun last."""

    def load(self, stage: Expr, turn: int, pair: int, to: KernelTensor) -> None:
        """Load 16 columns of a step, those of `turn`, for 16 outputs into four registers, two for each 8 outputs."""


class RowWeights:
    """Weights whose outputs are rows of matrices.

    `row_of(r)` gives for output r of the tile (condition, matrix, row) of each matrix that it may be a row of. All have
    the format of `matrix`.
    """

    def __init__(
        self,
        tile: ProductTile,
        matrix: CudaMatrix,
        row_of: Callable[[Expr], Sequence[tuple[Expr, CudaMatrix, Expr]]],
        place: ThreadIndex,
    ) -> None:
        self._tile, self._place = tile, place
        self._words = tile.outputs * _ROW_WORDS
        self._memory: KernelTensor = shared(_STAGES * self._words, dtype="uint32")
        row, self._half = bind(place.thread // 2), bind(place.thread % 2)
        self._rows = [(condition, each, bind(number)) for condition, each, number in row_of(row)]
        first = row * _ROW_WORDS
        places = [bind(first + start // _HALVES_A_WORD) for start in run_starts(matrix, self._half)]
        self._fetch = _Fetch(matrix, self._memory, places)

    def start(self, step: Expr, stage: Expr) -> None:
        """See `Weights`."""
        for condition, matrix, row in self._rows:
            with when(condition):
                self._fetch.start(matrix, WeightPiece(row, step, self._half), stage * self._words)

    def finish(self, stage: Expr) -> None:
        """See `Weights`."""
        self._fetch.finish(stage * self._words)

    def load(self, stage: Expr, turn: int, pair: int, to: KernelTensor) -> None:
        """See `Weights`."""
        output, column = places_of_pair(self._place.lane, turn, pair)
        row = self._tile.warp_output(self._place) + output + self._place.lane % 8
        word = stage * self._words + row * _ROW_WORDS + column // _HALVES_A_WORD
        run_extern("pi_ldmatrix_x4", place_in(to, 0), place_in(self._memory, word))


class ColumnWeights:
    """Weights whose outputs are columns of a matrix, from `first` on, a multiple of 32; a step has 32 rows.

    `row_of(i)` gives the row of the matrix for column i of the left factor.
    """

    def __init__(
        self, tile: ProductTile, matrix: CudaMatrix, row_of: Callable[[Expr], Expr], first: Expr, place: ThreadIndex
    ) -> None:
        self._tile, self._matrix, self._row_of, self._place = tile, matrix, row_of, place
        self._row_words = tile.outputs // _HALVES_A_WORD + _RUN_WORDS
        self._words = STEP * self._row_words
        self._memory: KernelTensor = shared(_STAGES * self._words, dtype="uint32")
        pieces = tile.outputs // PIECE
        self._number, part = bind(place.thread // pieces), bind(place.thread % pieces)
        # Past the last group the last is read again; nobody stores what comes of it.
        last = matrix.form.padded_columns(matrix.columns) // GROUP - 1
        self._group, self._half = bind(minimum(first // GROUP + part // 2, last)), bind(part % 2)
        start = self._number * self._row_words + part // 2 * (GROUP // _HALVES_A_WORD)
        places = [bind(start + column // _HALVES_A_WORD) for column in run_starts(matrix, self._half)]
        self._fetch = _Fetch(matrix, self._memory, places)

    def start(self, step: Expr, stage: Expr) -> None:
        """See `Weights`."""
        row = bind(self._row_of(bind(step * STEP + self._number)))
        self._fetch.start(self._matrix, WeightPiece(row, self._group, self._half), stage * self._words)

    def finish(self, stage: Expr) -> None:
        """See `Weights`."""
        self._fetch.finish(stage * self._words)

    def load(self, stage: Expr, turn: int, pair: int, to: KernelTensor) -> None:
        """See `Weights`."""
        output, row = places_of_pair(self._place.lane, turn, pair)
        column = bind((self._tile.warp_output(self._place) + output) // _HALVES_A_WORD)
        word = stage * self._words + (row + self._place.lane % 8) * self._row_words + column
        run_extern("pi_ldmatrix_x4_trans", place_in(to, 0), place_in(self._memory, word))


def places_of_pair(lane: Expr, turn: int, pair: int) -> tuple[Expr, Expr]:
    """Return output and column of the first element of the matrix [8, 8] a row of which a lane loads.

    Matrices 0 and 1 are two of columns, of the first 8 outputs, and 2 and 3 those of the others.
    """
    return pair * 2 * _OUTPUTS + lane // 16 * _OUTPUTS, turn * _DEPTH + lane // 8 % 2 * 8


class _Fetch:
    """The thread's piece of each step: its two runs go to `places` of `memory`, which are words of a stage."""

    def __init__(self, matrix: CudaMatrix, memory: KernelTensor, places: Sequence[Expr]) -> None:
        self._memory, self._places = memory, places
        self._registers = piece_registers(matrix) if matrix.form.scale_bytes else None

    def start(self, matrix: CudaMatrix, piece: WeightPiece, stage: Expr) -> None:
        if self._registers is not None:
            self._registers.load(matrix, piece)
            return
        for run, word in enumerate(self._places):
            copy_run(self._memory, at_word=stage + word, matrix=matrix, piece=piece, run=run)

    def finish(self, stage: Expr) -> None:
        if self._registers is None:
            return
        for word, pairs in zip(self._places, self._registers.unpacked(), strict=True):
            self._memory[tirx.Ramp(stage + word, 1, _RUN_WORDS)] = tirx.Shuffle(pairs, list(range(_RUN_WORDS)))


class _Activations:
    """The left factor of a tile: its tokens from `first` on, zeros past the last of `tokens`, at two stages."""

    def __init__(self, tile: ProductTile, x: Halves, first: Expr, tokens: Expr, place: ThreadIndex) -> None:
        self._tile, self._x, self._first, self._tokens, self._place = tile, x, first, tokens, place
        self._words = tile.tokens * _ROW_WORDS
        self._memory: KernelTensor = shared(_STAGES * self._words, dtype="uint32")

    def start(self, step: Expr, stage: Expr) -> None:
        """Begin to copy the columns of a step to `stage`."""
        runs = STEP // RUN
        for turn in range(self._tile.tokens * runs // self._tile.threads):
            number = bind(turn * self._tile.threads + self._place.thread)
            row, run = bind(number // runs), bind(number % runs)
            token = bind(self._first + row)
            is_there = tirx.Cast("int32", token < self._tokens)
            source = address(self._x.values, minimum(token, self._tokens - 1), step * STEP + run * RUN)
            word = stage * self._words + row * _ROW_WORDS + run * _RUN_WORDS
            run_extern("pi_copy_16", place_in(self._memory, word), source, is_there)

    def load(self, stage: Expr, turn: int, to: KernelTensor) -> None:
        """Load the warp's fragments of 16 columns, four registers each."""
        lane = self._place.lane
        for fragment in range(self._tile.token_fragments):
            row = self._tile.warp_token(self._place) + fragment * _TOKENS + lane % _TOKENS
            column = turn * (_DEPTH // _HALVES_A_WORD) + lane // _TOKENS * _RUN_WORDS
            word = stage * self._words + row * _ROW_WORDS + column
            run_extern("pi_ldmatrix_x4", place_in(to, fragment * _RESULTS), place_in(self._memory, word))


@dataclass(frozen=True)
class Products:
    """The sums that a lane has of a tile whose first token is `first`, of the columns of `x`; `tokens` count."""

    tile: ProductTile
    x: Halves
    first: Expr
    tokens: Expr
    sums: KernelTensor
    place: ThreadIndex

    @property
    def first_output(self) -> Expr:
        """The first output of the warp in the tile."""
        return self.tile.warp_output(self.place)

    def offset(self, fragment: int, i: int) -> Expr:
        """Return which output of the warp `value(fragment, i)` is."""
        return fragment * _OUTPUTS + self.place.lane % 4 * 2 + i

    def each_result(self, first: Expr, stop: int) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Iterate over (token, output, value) of a lane's results: the tile's first output is `first`, and those from
        `stop` on do not exist. The body of a loop is written once for each.
        """
        for token, value in self.each_token():
            for fragment in range(self.tile.output_fragments):
                for i in range(2):
                    output = bind(first + self.first_output + self.offset(fragment, i))
                    with when(output < stop):
                        yield token, output, value(fragment, i)

    def each_token(self) -> Iterator[tuple[Expr, Callable[[int, int], Expr]]]:
        """Iterate over the tokens of a lane that count: the body of a loop is written once for each.

        With each comes `value(output fragment, i)` of the two outputs that the lane has of each fragment.
        """
        fragments = self.tile.output_fragments
        for fragment in range(self.tile.token_fragments):
            for half in range(2):
                row = fragment * _TOKENS + half * (_TOKENS // 2) + self.place.lane // 4
                token = bind(self.first + self.tile.warp_token(self.place) + row)
                with when(token < self.tokens):
                    factor = bind(self.x.factors[token])
                    yield token, partial(self._value, fragment * fragments * _RESULTS + half * 2, factor)

    def _value(self, first: int, factor: Expr, output: int, i: int) -> Expr:
        return self.sums[first + output * _RESULTS + i] * factor


def multiply(
    tile: ProductTile,
    x: Halves,
    span: tuple[Expr, Expr],
    steps: tuple[Expr, Expr],
    weights: Weights,
    place: ThreadIndex,
) -> Products:
    """Multiply the tokens from `span`[0] on, below `span`[1], with `weights`, in columns of x of `steps`[0] up to [1].

    All threads of the block must come, and there must be a step.
    """
    (first, tokens), (begin, stop) = span, steps
    left = _Activations(tile, x, first, tokens, place)
    sums = zero_registers(tile.token_fragments * tile.output_fragments * _RESULTS)
    left.start(begin, 0)
    weights.start(begin, 0)
    with loop(0, stop - begin) as number:
        stage = bind(number % _STAGES)
        weights.finish(stage)
        run_extern("pi_copies_arrived")
        # Behind it all threads see the step, and nobody multiplies the one before, whose memory comes next.
        barrier()
        with when(begin + number + 1 < stop):
            left.start(begin + number + 1, 1 - stage)
            weights.start(begin + number + 1, 1 - stage)
        # A warp whose tokens do not exist has nothing to multiply.
        with when(first + tile.warp_token(place) < tokens):
            _multiply_step(tile, left, weights, stage, sums)
    return Products(tile, x, first, tokens, sums, place)


def _multiply_step(tile: ProductTile, left: _Activations, weights: Weights, stage: Expr, sums: KernelTensor) -> None:
    of_tokens = registers(tile.token_fragments * _RESULTS, dtype="uint32")
    of_outputs = registers(4, dtype="uint32")
    for turn in range(_TURNS):
        left.load(stage, turn, of_tokens)
        for output in range(tile.output_fragments):
            if output % 2 == 0:
                weights.load(stage, turn, output // 2, of_outputs)
            for token in range(tile.token_fragments):
                number = (token * tile.output_fragments + output) * _RESULTS
                factors = place_in(of_tokens, token * _RESULTS), place_in(of_outputs, output % 2 * 2)
                run_extern("pi_mma", place_in(sums, number), *factors)
