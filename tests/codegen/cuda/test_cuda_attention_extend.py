"""Attention on a GPU that writes the key and the value of its token to the cache before."""

from dataclasses import asdict

import numpy as np
import pytest

from helpers.kernels.caches import SCALE, Heads, expected_attention, in_q8, random_cache
from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import Array, assert_close, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel
from picompile_codegen.specs import AttentionSpec, Mode

ROWS = 3
SHAPES = {
    "multi-head": Heads(3, 3, 24, 24, context=50, sequences=4),
    "window of one": Heads(6, 2, 20, 12, context=50, sequences=4, window=1, kv_dtype="float32"),
    "q8": Heads(2, 2, 40, 72, context=50, sequences=4, kv_dtype="q8"),
    "parts": Heads(4, 2, 16, 16, context=600, sequences=4),
    # So another launch extends the caches.
    "more heads than a block has": Heads(9, 1, 8, 8, context=300, sequences=4),
    "all options": Heads(4, 2, 16, 8, context=300, sequences=4, softcap=5.0, slopes=True, sinks=True),
}
CASES: list[tuple[str, Mode, int, bool]] = [
    *((name, "one", 1, True) for name in ("multi-head", "window of one", "parts", "all options")),
    ("q8", "one", 1, False),
    *((name, "sequences", tokens, True) for name in ("q8", "more heads than a block has") for tokens in (2, 3)),
]


def attention(name: str, mode: Mode, turn: bool) -> CudaKernel:
    rows = 1 if mode == "one" else ROWS
    return cuda.write_kernel(
        AttentionSpec(**asdict(SHAPES[name]), rows=rows, scale=SCALE, mode=mode, extend=True, turn=turn)
    )


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    return CudaWorkbench(tmp_path_factory.mktemp("extend") / "device.so")


def turned(x: Array, cos: Array, sin: Array, positions: list[int]) -> Array:
    """x [tokens, heads, d], in its own precision."""
    first, second = np.split(x, 2, axis=-1)
    c, s = (table[positions][:, None].astype(x.dtype) for table in (cos, sin))
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


@pytest.mark.slow("compiles a kernel per case; one is fast", but=("0-multi-head-",))
@pytest.mark.parametrize(("name", "mode", "tokens", "turn"), CASES)
@pytest.mark.parametrize("first", [0, 1])
def test_extends_and_attends(
    workbench: CudaWorkbench, name: str, mode: Mode, tokens: int, turn: bool, first: int
) -> None:
    """The new rows are those that numpy rounds, or that weights are packed to; nothing else in the caches changes."""
    shape, rng = SHAPES[name], np.random.default_rng([tokens, first])
    positions, slots = [first * (shape.context - 1), 5, 30][:tokens], [2, 3, 0][:tokens]
    filled = [0] * shape.sequences
    for slot, position in zip(slots, positions, strict=True):
        filled[slot] = position
    angle = rng.uniform(0, 7, (shape.context, shape.head_dim // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    inputs = {name: uniform(rng, tokens, shape.kv_heads * dim) for name, dim in widths(shape).items()}
    options = shape.options(rng)
    inputs |= {"q": 3 * uniform(rng, tokens, shape.heads * shape.head_dim), "cos": cos, "sin": sin}
    caches = {side: random_cache(rng, shape, side, filled) for side in "kv"}
    where = {"positions": np.int32(positions), "slots": np.int32(slots)} if mode == "sequences" else {}
    given = {**inputs, **where, **options, **caches["k"].arguments, **caches["v"].arguments}
    result = workbench.run(attention(name, mode, turn), given, tokens=tokens, position=positions[0], slot=slots[0])

    for side, dim in widths(shape).items():
        new = inputs[side].reshape(tokens, shape.kv_heads, dim)
        new = turned(new, cos, sin, positions) if turn and side == "k" else new
        expected = stored(new, side, shape.kv_dtype)
        for argument in caches[side].arguments:
            whole = caches[side].arguments[argument].copy()
            whole[slots, :, positions] = expected[argument]
            assert result[argument].tobytes() == whole.tobytes()
        caches[side].values[slots, :, positions] = expected["stands for"]
    q = inputs["q"].reshape(tokens, shape.heads, -1).astype(np.float64)
    q = (turned(q, cos, sin, positions) if turn else q).reshape(tokens, -1)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        values = (caches[side].values[slot] for side in "kv")
        expected_y = expected_attention(shape, q[row : row + 1], *values, position, options)
        assert_close(result["y"][row : row + 1], expected_y)
    assert np.isnan(result["y"][tokens:]).all()


def widths(shape: Heads) -> dict[str, int]:
    """Return the widths of keys and of values."""
    return {"k": shape.head_dim, "v": shape.value_dim}


def stored(rows: Array, side: str, kv_dtype: str) -> dict[str, Array]:
    """Return rows [tokens, kv_heads, d] as each argument of a cache stores them, and the values that they stand for."""
    if kv_dtype != "q8":
        data = rows.astype(kv_dtype)
        return {f"{side}_cache": data, "stands for": data.astype(np.float64)}
    data, scales, values = in_q8(rows)
    return {f"{side}_cache": data, f"{side}_cache_scales": scales, "stands for": values}
