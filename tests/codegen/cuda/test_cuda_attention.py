"""Attention on a GPU over a cache that is filled already, in all modes, against the same in float64."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.caches import SCALE, Heads, expected_attention, random_cache
from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import weights_in_halves
from helpers.kernels.workbench import Array, assert_close, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import AttentionSpec, Mode

CHUNK = 45
ROWS = 3

# Tiles of a single token have 256 positions. Rows of keys and values are read 16, 8, 4 or fewer bytes at a time, by 1
# to 32 threads, some of which may have nothing or several units to read.
ONE = {
    "multi-head, two parts": Heads(3, 3, 64, 64, context=300),
    "seven heads of one key, 8 bytes": Heads(7, 1, 20, 20, sequences=4),
    "more heads than a block has": Heads(9, 1, 8, 8, context=300),
    "float32, several units": Heads(2, 1, 264, 16, kv_dtype="float32", context=40),
    "window over a part": Heads(4, 2, 16, 16, window=300, context=1000, sequences=4),
    "single elements": Heads(3, 3, 10, 7),
    "many parts": Heads(3, 1, 16, 16, context=32768),
    "tiles in a part": Heads(1, 1, 8, 8, context=131100),
    "q8, odd widths": Heads(3, 1, 12, 44, kv_dtype="q8", window=70, sequences=4),
    "q8, threads to spare": Heads(5, 1, 80, 80, kv_dtype="q8", context=270),
    "soft cap": Heads(2, 2, 12, 8, softcap=3.0, kv_dtype="float32"),
    "slopes": Heads(9, 1, 8, 8, context=300, slopes=True),
    "sinks, q8": Heads(3, 1, 12, 44, kv_dtype="q8", sinks=True),
    "all options": Heads(6, 2, 16, 8, context=600, window=300, sequences=4, softcap=5.0, slopes=True, sinks=True),
}
OF_SEQUENCES = ("window over a part", "q8, odd widths", "all options")
# Tiles of a chunk have 64 positions and 64 queries, its parts 512 positions.
CHUNKS = {
    "groups of 3, single elements": Heads(3, 1, 10, 7, kv_dtype="float32"),
    "window, many columns": Heads(2, 2, 40, 72, window=70),
    "slices of values": Heads(1, 1, 8, 264, context=150),
    "parts, window": Heads(2, 2, 8, 8, context=1200, window=530, sequences=4),
    "q8": Heads(4, 2, 44, 44, kv_dtype="q8", sequences=4),
    "soft cap, slopes": Heads(4, 2, 12, 8, softcap=3.0, slopes=True),
    "sinks, q8": Heads(3, 1, 12, 44, sinks=True, kv_dtype="q8"),
    "all options, parts": Heads(3, 1, 8, 8, context=1200, window=530, softcap=5.0, slopes=True, sinks=True),
}
POSITIONS = (0, 63, 255, 256, 299, 999, 16499, 32767)


def attention(shape: Heads, mode: Mode, rows: int) -> CudaKernel:
    return cuda.write_kernel(AttentionSpec(**asdict(shape), rows=rows, scale=SCALE, mode=mode))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    return CudaWorkbench(tmp_path_factory.mktemp("attention") / "device.so")


def queries(rng: np.random.Generator, shape: Heads, tokens: int) -> Array:
    """Scores far apart, so that softmax has something to choose from."""
    return 5 * uniform(rng, tokens, shape.heads * shape.head_dim)


def attend(
    workbench: CudaWorkbench, shape: Heads, rows: int, tokens: int, position: int, not_a_number: int | None = None
) -> tuple[Array, Array]:
    """y as the kernel has it, and as it is to be. The first head's key of position `not_a_number` has a NaN in it."""
    rng = np.random.default_rng([tokens, position])
    q, slot = queries(rng, shape, tokens), shape.sequences // 2
    filled = [0] * shape.sequences
    filled[slot] = position + tokens
    keys, values = (random_cache(rng, shape, side, filled) for side in "kv")
    options = shape.options(rng)
    if not_a_number is not None:
        for cache in (keys.arguments["k_cache"], keys.values):
            cache[slot, 0, not_a_number, shape.head_dim // 2] = np.nan
    # A kernel of one row is for one token, whatever the step says: the last token of a prompt runs through some.
    result = workbench.run(
        attention(shape, "one" if rows == 1 else "chunk", rows),
        {"q": q, **keys.arguments, **values.arguments, **options},
        tokens=tokens if rows > 1 else -1,
        position=position,
        slot=slot if shape.sequences > 1 else -1,
    )
    cached = keys.values[slot], values.values[slot]
    if rows > 1:
        q, cached = halves_of_queries(shape, q), (weights_in_halves(cached[0]), weights_in_halves(cached[1]))
    return result["y"], expected_attention(shape, q, *cached, position, options)


def halves_of_queries(shape: Heads, q: Array) -> Array:
    """Queries, rounded once they are scaled."""
    scale = AttentionSpec(**asdict(shape), rows=1, scale=SCALE, mode="one").query_scale
    return weights_in_halves(q * np.float32(scale)) / np.float32(scale)


def tolerance(rows: int) -> float:
    """Chunks round their weights to halves as well: by 2^-12 of them."""
    return 3e-4 if rows > 1 else 2e-5


def check(workbench: CudaWorkbench, shape: Heads, rows: int, tokens: int, position: int) -> None:
    y, expected = attend(workbench, shape, rows, tokens, position)
    assert_close(y[:tokens], expected, tolerance(rows))
    assert np.isnan(y[tokens:]).all()


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast",
    but=("multi-head, two parts-", "q8, odd widths-", "window over a part-", "all options-"),
)
@pytest.mark.parametrize(
    ("name", "position"), [(name, at) for name, shape in ONE.items() for at in POSITIONS if at < shape.context]
)
def test_one_token(workbench: CudaWorkbench, name: str, position: int) -> None:
    check(workbench, ONE[name], 1, 1, position)


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("33-97-window, many columns",))
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (6, 61), (CHUNK, 0), (33, 97)])
def test_chunk(workbench: CudaWorkbench, name: str, tokens: int, position: int) -> None:
    check(workbench, CHUNKS[name], CHUNK, tokens, position)


def test_values_beyond_halves_do_not_reach_queries_that_do_not_see_them(workbench: CudaWorkbench) -> None:
    """In a cache of float32; the first 40 positions are small, and the next queries see them alone."""
    shape, rng = CHUNKS["groups of 3, single elements"], np.random.default_rng(7)
    q = queries(rng, shape, CHUNK)
    keys, values = (random_cache(rng, shape, side, [CHUNK]) for side in "kv")
    for array in (values.arguments["v_cache"], values.values):
        array[0, :, 40:CHUNK] = 1e5
    result = workbench.run(
        attention(shape, "chunk", CHUNK),
        {"q": q, **keys.arguments, **values.arguments, **shape.options(rng)},
        tokens=CHUNK,
        position=0,
    )
    expected = expected_attention(
        shape, halves_of_queries(shape, q), weights_in_halves(keys.values[0]), values.values[0], 0, shape.options(rng)
    )
    assert_close(result["y"][:40], expected[:40], 2e-3)


@pytest.mark.parametrize("name", ["window, many columns", "q8"])
def test_a_chunk_for_sm_75(tmp_path: Path, name: str) -> None:
    """It multiplies 8 columns at a time."""
    check(CudaWorkbench(tmp_path / "device.so", sm=75), CHUNKS[name], CHUNK, CHUNK, 40)


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast")
@pytest.mark.parametrize("name", ["parts, window", "all options, parts"])
@pytest.mark.parametrize("position", [490, 511, 1200 - CHUNK])
def test_a_chunk_whose_positions_are_shared_by_blocks(workbench: CudaWorkbench, name: str, position: int) -> None:
    check(workbench, CHUNKS[name], CHUNK, CHUNK, position)


@pytest.mark.parametrize(
    ("shape", "rows", "position", "not_a_number"),
    [
        (ONE["multi-head, two parts"], 1, 299, 270),
        (ONE["more heads than a block has"], 1, 299, 3),
        (ONE["window over a part"], 1, 999, 700),
        (CHUNKS["window, many columns"], CHUNK, 60, 20),
        (CHUNKS["groups of 3, single elements"], CHUNK, 100, 121),
        pytest.param(
            CHUNKS["parts, window"], CHUNK, 511, 20, marks=pytest.mark.slow("emulates a chunk behind 500 positions")
        ),
        (ONE["all options"], 1, 400, 350),
        pytest.param(
            CHUNKS["all options, parts"],
            CHUNK,
            511,
            20,
            marks=pytest.mark.slow("emulates a chunk behind 500 positions"),
        ),
    ],
    ids=str,
)
def test_nan_keys_reach_exactly_the_queries_that_see_them(
    workbench: CudaWorkbench, shape: Heads, rows: int, position: int, not_a_number: int
) -> None:
    """Not 0, and not the others: a model that is broken shows, in prompts as well. Nobody else is touched by it."""
    y, expected = attend(workbench, shape, rows, rows, position, not_a_number)
    broken = np.isnan(expected)
    assert broken.any()
    assert np.array_equal(np.isnan(y), broken)
    assert broken.all() or np.abs(y - expected)[~broken].max() <= tolerance(rows) * np.abs(expected[~broken]).max()


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("3-all options",))
@pytest.mark.parametrize("name", OF_SEQUENCES)
@pytest.mark.parametrize("tokens", [1, ROWS])
def test_several_sequences(workbench: CudaWorkbench, name: str, tokens: int) -> None:
    """Each row is of its own sequence, at its own position; the others are not of this step."""
    shape = ONE[name]
    rng = np.random.default_rng(tokens)
    q = queries(rng, shape, tokens)
    positions = np.int32([shape.context - 1, 5, 70][:tokens])
    slots = np.int32([2, 3, 0][:tokens])
    filled = [0] * shape.sequences
    for slot, position in zip(slots, positions, strict=True):
        filled[slot] = position + 1
    keys, values = (random_cache(rng, shape, side, filled) for side in "kv")
    options = shape.options(rng)
    inputs = {"q": q, "positions": positions, "slots": slots, **keys.arguments, **values.arguments, **options}
    result = workbench.run(attention(shape, "sequences", ROWS), inputs, tokens=tokens, position=-1)
    assert np.isnan(result["y"][tokens:]).all()
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        cached = (keys.values[slot], values.values[slot])
        expected = expected_attention(shape, q[row : row + 1], *cached, position, options)
        assert_close(result["y"][row : row + 1], expected)
        inputs = {"q": q[row : row + 1], **keys.arguments, **values.arguments, **options}
        alone = workbench.run(attention(shape, "one", 1), inputs, position=position, slot=slot)
        assert np.array_equal(alone["y"][0], result["y"][row]), "one of several sequences is like any other"


def test_chunks_do_not_extend_caches() -> None:
    with pytest.raises(CodegenError, match="chunks do not extend caches"):
        cuda.write_kernel(
            AttentionSpec(**asdict(ONE["single elements"]), rows=8, scale=SCALE, mode="chunk", extend=True)
        )


def test_values_wider_than_a_block_are_refused() -> None:
    """257 columns that nothing but single elements divides, and 256 threads."""
    with pytest.raises(CodegenError, match="257 wide"):
        attention(Heads(1, 1, 8, 257), "one", 1)
