"""Attention on a GPU in all modes against float64, over filled caches: of single tokens and of chunks."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.caches import SCALE, Cached, Heads, expected_attention, random_cache
from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import weights_in_halves
from helpers.kernels.workbench import Array, assert_close, assert_rows, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import AttentionSpec, Mode

CHUNK = 45
SLOW = "compiles a kernel per case; one of each kind is fast"

# Tiles of a single token have 256 positions. Rows of keys and values are read 16, 8, 4 or fewer bytes at a time, by 1
# to 32 threads, some of which may have nothing or several units to read.
ONE = {
    "multi-head, two parts": Heads(3, 3, 64, 64, context=300),
    "seven heads of one key, 8 bytes": Heads(7, 1, 20, 20, sequences=4),
    "more heads than a block has": Heads(9, 1, 8, 8, context=300, slopes=True),
    "float32, several units": Heads(2, 1, 264, 16, kv_dtype="float32", context=40),
    "window over a part": Heads(4, 2, 16, 16, window=300, context=1000, sequences=4),
    "single elements": Heads(3, 3, 10, 7),
    "many parts": Heads(3, 1, 16, 16, context=32768),
    "tiles in a part": Heads(1, 1, 8, 8, context=131100),
    "q8, odd widths": Heads(3, 1, 12, 44, kv_dtype="q8", window=70, sequences=4),
    "q8, threads to spare": Heads(5, 1, 80, 80, kv_dtype="q8", context=270),
    "soft cap": Heads(2, 2, 12, 8, softcap=3.0, kv_dtype="float32"),
    "sinks, q8": Heads(3, 1, 12, 44, kv_dtype="q8", sinks=True),
    "all options": Heads(6, 2, 16, 8, context=600, window=300, sequences=4, softcap=5.0, slopes=True, sinks=True),
}
POSITIONS = (0, 255, 256, 299, 999, 16499, 32767)
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


def attention(shape: Heads, mode: Mode, rows: int, **options: bool) -> CudaKernel:
    return cuda.write_kernel(AttentionSpec(**asdict(shape), rows=rows, scale=SCALE, mode=mode, **options))


def queries(rng: np.random.Generator, shape: Heads, tokens: int) -> Array:
    """Scores far apart, so that softmax has something to choose from."""
    return 5 * uniform(rng, tokens, shape.heads * shape.head_dim)


def attend(
    workbench: CudaWorkbench,
    shape: Heads,
    rows: int,
    tokens: int,
    position: int,
    spoil: Callable[[Cached, Cached], None] = lambda keys, values: None,
) -> tuple[Array, Array]:
    """y as the kernel has it, and as it is to be, over keys and values that `spoil` may change."""
    rng = np.random.default_rng([tokens, position])
    q, slot = queries(rng, shape, tokens), shape.sequences // 2
    filled = [0] * shape.sequences
    filled[slot] = position + tokens
    keys, values = (random_cache(rng, shape, side, filled) for side in "kv")
    options = shape.options(rng)
    spoil(keys, values)
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
        # Queries are rounded once they are scaled.
        scale = np.float32(AttentionSpec(**asdict(shape), rows=1, scale=SCALE, mode="one").query_scale)
        q, *cached = weights_in_halves(q * scale) / scale, *map(weights_in_halves, cached)
    return result["y"], expected_attention(shape, q, *cached, position, options)


def tolerance(rows: int) -> float:
    """Chunks round their weights to halves as well: by 2^-12 of them."""
    return 3e-4 if rows > 1 else 2e-5


@pytest.mark.slow(SLOW, but=("all options",))
@pytest.mark.parametrize("name", ONE)
def test_one_token(workbench: CudaWorkbench, name: str) -> None:
    for position in (position for position in POSITIONS if position < ONE[name].context):
        assert_rows(*attend(workbench, ONE[name], 1, 1, position), tolerance(1))


# Products for sm_75 are of 8 columns at a time.
@pytest.mark.slow(SLOW, but=("80-window, many columns",))
@pytest.mark.parametrize(
    ("sm", "name"), [*((80, name) for name in CHUNKS), (75, "window, many columns"), (75, "q8")], ids=str
)
def test_chunk(tmp_path: Path, sm: int, name: str) -> None:
    workbench, shape = CudaWorkbench(tmp_path, sm), CHUNKS[name]
    places = [(CHUNK, 90)] if sm == 75 else [(1, 0), (6, 61), (CHUNK, 90)]
    # Positions that blocks share.
    places += [(CHUNK, 490), (CHUNK, 511), (CHUNK, 1200 - CHUNK)] if shape.context == 1200 else []
    for tokens, position in places:
        assert_rows(*attend(workbench, shape, CHUNK, tokens, position), tolerance(CHUNK))


def test_values_beyond_halves_do_not_reach_queries_that_do_not_see_them(workbench: CudaWorkbench) -> None:
    """In a cache of float32; the first 40 positions are small, and the next queries see them alone."""

    def spoil(_: Cached, values: Cached) -> None:
        for array in (values.arguments["v_cache"], values.values):
            array[0, :, 40:CHUNK] = 1e5

    with np.errstate(over="ignore", invalid="ignore"):
        y, expected = attend(workbench, CHUNKS["groups of 3, single elements"], CHUNK, CHUNK, 0, spoil)
    assert_close(y[:40], expected[:40], tolerance(CHUNK))


@pytest.mark.parametrize(
    ("shape", "rows", "position", "not_a_number"),
    [
        pytest.param(ONE["multi-head, two parts"], 1, 299, 270, marks=pytest.mark.slow(SLOW)),
        pytest.param(ONE["window over a part"], 1, 999, 700, marks=pytest.mark.slow(SLOW)),
        (ONE["all options"], 1, 400, 350),
        (CHUNKS["window, many columns"], CHUNK, 60, 20),
        (CHUNKS["groups of 3, single elements"], CHUNK, 100, 121),
        pytest.param(
            *(CHUNKS["all options, parts"], CHUNK, 511, 20),
            marks=pytest.mark.slow("emulates a chunk behind 500 positions"),
        ),
    ],
    ids=str,
)
def test_nan_keys_reach_exactly_the_queries_that_see_them(
    workbench: CudaWorkbench, shape: Heads, rows: int, position: int, not_a_number: int
) -> None:
    """Not 0, and not the others: a model that is broken shows, in prompts as well. Nobody else is touched by it."""

    def spoil(keys: Cached, _: Cached) -> None:
        for cache in (keys.arguments["k_cache"], keys.values):
            cache[shape.sequences // 2, 0, not_a_number, shape.head_dim // 2] = np.nan

    y, expected = attend(workbench, shape, rows, rows, position, spoil)
    broken = np.isnan(expected)
    assert broken.any()
    assert np.array_equal(np.isnan(y), broken)
    assert broken.all() or np.abs(y - expected)[~broken].max() <= tolerance(rows) * np.abs(expected[~broken]).max()


def test_what_no_kernel_does_is_refused() -> None:
    with pytest.raises(CodegenError, match="chunks do not extend caches"):
        attention(ONE["single elements"], "chunk", 8, extend=True)
    # 257 columns that nothing but single elements divides, and 256 threads.
    with pytest.raises(CodegenError, match="257 wide"):
        attention(Heads(1, 1, 8, 257), "one", 1)
