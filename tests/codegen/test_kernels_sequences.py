"""Attention of single tokens of several sequences, and what adds rows to caches, on the CPU and in the emulation."""

from dataclasses import asdict

import numpy as np
import pytest
from test_kernels_attention import SHAPES, TOLERANCES, queries

from helpers.kernels.caches import SCALE, Cached, Heads, expected_attention, in_q4, in_q8, random_cache
from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import Array, Workbench, assert_rows, uniform
from picompile_codegen.specs import AttentionSpec, Mode

ROWS = 3
SLOW = "compiles a kernel per case; one of each kind is fast"
SEQUENCES = {
    **{name: shape for name, shape in SHAPES.items() if shape.sequences > 1},
    "window over a part": Heads(4, 2, 16, 16, window=300, context=1000, sequences=4),
    "q8, odd widths": Heads(3, 1, 12, 44, kv_dtype="q8", window=70, sequences=4),
    "all options": Heads(6, 2, 16, 8, context=600, window=300, sequences=4, softcap=5.0, slopes=True, sinks=True),
}
EXTENDED = {
    "multi-head": Heads(3, 3, 24, 24, context=50, sequences=4),
    "groups, window": Heads(6, 2, 20, 12, context=50, sequences=4, window=9),
    "window of one": Heads(6, 2, 20, 12, context=50, sequences=4, window=1, kv_dtype="float32"),
    "q8": Heads(2, 2, 40, 72, context=50, sequences=4, kv_dtype="q8"),
    "q4": Heads(2, 2, 64, 32, context=50, sequences=4, kv_dtype="q4"),
    "parts": Heads(4, 2, 16, 16, context=1100, sequences=4),
    # So another launch extends the caches.
    "more heads than a block has": Heads(9, 1, 8, 8, context=300, sequences=4),
    "all options": Heads(4, 2, 16, 8, context=300, sequences=4, softcap=5.0, slopes=True, sinks=True),
}
# The errors of attention to what is not rounded yet, by what it is rounded to.
OF_CPU = {"float16": 2e-3, "q8": 2e-2, "q4": 0.3}


def attention(shape: Heads, mode: Mode, rows: int, **options: bool) -> AttentionSpec:
    return AttentionSpec(**asdict(shape), rows=rows, scale=SCALE, mode=mode, **options)


@pytest.mark.slow(SLOW)
@pytest.mark.parametrize("name", SEQUENCES)
def test_several_sequences(either: Workbench, name: str) -> None:
    """Each row is of its own sequence, at its own position; the others are not of this step."""
    shape = SEQUENCES[name]
    if name in SHAPES and isinstance(either, CudaWorkbench):
        pytest.skip("GPUs have shapes of their own")
    for tokens in (1, 2, ROWS):
        rng = np.random.default_rng(tokens)
        q, slots = queries(rng, shape, tokens), np.int32([2, 3, 0][:tokens])
        positions = np.int32([shape.context - 1, 5, 70][:tokens])
        caches, given = filled_caches(rng, shape, slots, positions + 1)
        where = {"positions": positions, "slots": slots}
        found = either.run(attention(shape, "sequences", ROWS), {"q": q, **where, **given}, tokens=tokens, position=-1)
        tolerance = 2e-5 if isinstance(either, CudaWorkbench) else TOLERANCES.get(shape.kv_dtype, 2e-5)
        assert_rows(found["y"], attended(shape, q, caches, slots, positions, given), tolerance)
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            inputs = {"q": q[row : row + 1], **given}
            alone = either.run(attention(shape, "one", 1), inputs, position=position, slot=slot)
            assert np.array_equal(alone["y"][0], found["y"][row]), "one of several sequences is like any other"


def filled_caches(
    rng: np.random.Generator, shape: Heads, slots: Array, counts: Array
) -> tuple[dict[str, Cached], dict[str, Array]]:
    """Caches with so many positions in these slots, and what kernels are given: these, slopes and sinks."""
    filled = [0] * shape.sequences
    for slot, count in zip(slots, counts, strict=True):
        filled[slot] = count
    caches = {side: random_cache(rng, shape, side, filled) for side in "kv"}
    return caches, {**caches["k"].arguments, **caches["v"].arguments, **shape.options(rng)}


def attended(
    shape: Heads, q: Array, caches: dict[str, Cached], slots: Array, positions: Array, given: dict[str, Array]
) -> Array:
    """Return y in float64, each row with the cache of its own slot."""
    return np.concatenate(
        [
            expected_attention(shape, row[None], *(caches[side].values[slot] for side in "kv"), position, given)
            for row, slot, position in zip(q, slots, positions, strict=True)
        ]
    )


def turned(x: Array, cos: Array, sin: Array, positions: Array) -> Array:
    """x [tokens, heads, d], in its own precision."""
    first, second = np.split(x, 2, axis=-1)
    c, s = (table[positions][:, None].astype(x.dtype) for table in (cos, sin))
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


def stored(rows: Array, side: str, kv_dtype: str) -> dict[str, Array]:
    """Return rows [tokens, kv_heads, d] as each argument of a cache stores them, and the values that they stand for."""
    if kv_dtype not in ("q8", "q4"):
        data = rows.astype(kv_dtype)
        return {f"{side}_cache": data, "stands for": data.astype(np.float64)}
    data, scales, values = {"q8": in_q8, "q4": in_q4}[kv_dtype](rows)
    return {f"{side}_cache": data, f"{side}_cache_scales": scales, "stands for": values}


@pytest.mark.slow(SLOW, but=("cpu-multi-head-one-1-True", "cpu-q4-sequences-3", "gpu-multi-head-"))
@pytest.mark.parametrize(
    ("name", "mode", "tokens", "turn"),
    [
        *((name, "one", 1, True) for name in EXTENDED),
        *((name, "one", 1, False) for name in ("multi-head", "q8")),
        *((name, "sequences", tokens, True) for name in ("q8", "more heads than a block has") for tokens in (2, 3)),
        *((name, "sequences", 3, True) for name in ("q4", "parts")),
    ],
)
def test_extends_and_attends(either: Workbench, name: str, mode: Mode, tokens: int, turn: bool) -> None:
    """The new rows are those that numpy rounds, or that weights are packed to; nothing else in the caches changes.

    The CPU adds products in another order, so that a few numbers are rounded to the next one, and attends to what is
    not rounded yet.
    """
    shape, is_exact = EXTENDED[name], isinstance(either, CudaWorkbench)
    if shape.kv_dtype == "q4" and is_exact:
        pytest.skip("no GPU has such caches")
    spec = attention(shape, mode, 1 if mode == "one" else ROWS, extend=True, turn=turn)
    for first in (0, shape.context - 1):
        rng = np.random.default_rng([tokens, first])
        positions, slots = np.int32([first, 5, 30][:tokens]), np.int32([2, 3, 0][:tokens])
        caches, given = filled_caches(rng, shape, slots, positions)
        angle = rng.uniform(0, 7, (shape.context, shape.head_dim // 2))
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        q = 3 * uniform(rng, tokens, shape.heads, shape.head_dim)
        rows = {side: uniform(rng, tokens, *caches[side].values.shape[1::2]) for side in "kv"}
        inputs = {name: array.reshape(tokens, -1) for name, array in (("q", q), *rows.items())}
        inputs |= {"cos": cos, "sin": sin, **given}
        inputs |= {"positions": positions, "slots": slots} if mode == "sequences" else {}
        found = either.same(spec, inputs, tokens=tokens, position=positions[0], slot=slots[0])

        for side, new in rows.items():
            expected = stored(turned(new, cos, sin, positions) if turn and side == "k" else new, side, shape.kv_dtype)
            for argument in caches[side].arguments:
                written, whole = found[argument][slots, :, positions], caches[side].arguments[argument].copy()
                if is_exact:
                    assert np.array_equal(written, expected[argument])
                is_close = np.isclose(written.astype(float), expected[argument].astype(float), rtol=1e-3, atol=1e-6)
                assert is_close.mean() >= 0.99
                whole[slots, :, positions] = written
                assert found[argument].tobytes() == whole.tobytes(), "what was there has changed"
            caches[side].values[slots, :, positions] = expected["stands for"]
        wide = q.astype(np.float64)
        wide = (turned(wide, cos, sin, positions) if turn else wide).reshape(tokens, -1)
        tolerance = 2e-5 if is_exact or shape.kv_dtype == "float32" else OF_CPU[shape.kv_dtype]
        assert_rows(found["y"], attended(shape, wide, caches, slots, positions, given), tolerance)
