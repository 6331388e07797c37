"""Attention over a cache that is filled already, of single tokens and of chunks, against the same in float64."""

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.kernels.caches import Heads, expected_attention, random_cache
from helpers.kernels.workbench import Workbench, assert_close, uniform

CHUNK = 13

SHAPES = {
    "multi-head": Heads(5, 5, 64, 64),
    "groups of 2": Heads(4, 2, 136, 136),
    "groups of 4": Heads(64, 16, 32, 32),
    "one key head": Heads(7, 1, 20, 20, sequences=4),
    "float32": Heads(6, 2, 64, 64, kv_dtype="float32"),
    "narrow values": Heads(4, 4, 40, 12),
    "window": Heads(4, 2, 72, 72, window=70, sequences=4),
    "window of one": Heads(2, 2, 64, 64, window=1),
    "short": Heads(2, 2, 64, 64, context=17),
    "q8": Heads(5, 5, 64, 64, kv_dtype="q8", sequences=4),
    "q8, groups of 2": Heads(4, 2, 136, 136, kv_dtype="q8"),
    "q8, groups of 4": Heads(64, 16, 32, 32, kv_dtype="q8"),
    "q8, odd widths": Heads(3, 1, 12, 44, kv_dtype="q8", window=70),
    "q4": Heads(5, 5, 64, 64, kv_dtype="q4", sequences=4),
    "q4, groups of 2": Heads(4, 2, 160, 160, kv_dtype="q4"),
    "q4, groups of 4": Heads(64, 16, 32, 32, kv_dtype="q4"),
    # Parts of 512 positions.
    "parts": Heads(6, 2, 64, 64, context=1400),
    "parts, q8": Heads(3, 3, 64, 64, context=1400, kv_dtype="q8"),
    "parts, q4": Heads(3, 3, 96, 32, context=1400, kv_dtype="q4"),
    "parts, window": Heads(5, 1, 8, 8, context=1400, window=600, sequences=4),
    "soft cap": Heads(2, 2, 40, 40, softcap=3.0, kv_dtype="float32"),
    "slopes, narrow values": Heads(6, 2, 20, 12, slopes=True),
    "sinks, groups of 7": Heads(7, 1, 20, 20, sinks=True, sequences=4),
    "all options, q8": Heads(6, 3, 24, 44, softcap=5.0, slopes=True, sinks=True, window=70, kv_dtype="q8", sequences=4),
    "all options, q4": Heads(6, 3, 32, 64, softcap=5.0, slopes=True, sinks=True, window=70, kv_dtype="q4", sequences=4),
    "all options, parts": Heads(3, 1, 8, 20, context=1400, window=600, softcap=5.0, slopes=True, sinks=True),
}
# What others test in single tokens is no matter in chunks, and kernels for these take long to compile.
IN_CHUNKS = (
    *("multi-head", "groups of 2", "one key head", "narrow values", "window", "short", "q8", "q8, groups of 2"),
    *("q8, odd widths", "q4", "q4, groups of 2", "soft cap", "slopes, narrow values", "sinks, groups of 7"),
    *("all options, q8", "all options, q4"),
)
# Shapes that are not slow: together they go every way through a kernel.
FAST = ("groups of 2", "window", "q8, odd widths", "soft cap")
# Queries have 16 bits there, and scores here reach 50.
TOLERANCES = {"q8": 4e-4, "q4": 4e-4}


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("attention") / "host.so")


def queries(rng: np.random.Generator, shape: Heads, tokens: int) -> NDArray[np.float32]:
    """Scores far apart, so that softmax has something to choose from."""
    return 5 * uniform(rng, tokens, shape.heads * shape.head_dim)


def check(workbench: Workbench, name: str, rows: int, tokens: int, position: int) -> None:
    shape = SHAPES[name]
    position = min(position, shape.context - tokens)
    rng = np.random.default_rng([tokens, position])
    q, slot = queries(rng, shape, tokens), shape.sequences // 2
    filled = [0] * shape.sequences
    filled[slot] = position + tokens
    keys, values = (random_cache(rng, shape, side, filled) for side in "kv")
    options = shape.options(rng)
    kernel = shape.kernel("one" if rows == 1 else "chunk", rows)
    # A kernel of one row is for one token, whatever the step says: the last token of a prompt runs through some.
    inputs, step = {"q": q, **keys.arguments, **values.arguments, **options}, tokens if rows > 1 else -1
    results = [
        workbench.run(kernel, inputs, tokens=step, position=position, slot=slot, threads=threads)["y"]
        for threads in (1, 2, 3, 5)
    ]
    expected = expected_attention(shape, q, keys.values[slot], values.values[slot], position, options)
    assert_close(results[0][:tokens], expected, TOLERANCES.get(shape.kv_dtype, 2e-5))
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast", but=("all options, parts]", *(f"{name}]" for name in FAST))
)
@pytest.mark.parametrize("name", SHAPES)
def test_one_token(workbench: Workbench, name: str) -> None:
    for position in (0, 3, 63, 64, 150, 190, 511, 512, 1399):
        if position < max(SHAPES[name].context, 200):
            check(workbench, name, 1, 1, position)


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=tuple(f"{name}]" for name in FAST))
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunk(workbench: Workbench, name: str) -> None:
    for tokens, position in ((1, 0), (6, 3), (CHUNK, 0), (CHUNK, 40), (6, 95), (CHUNK, 190)):
        check(workbench, name, CHUNK, tokens, position)
