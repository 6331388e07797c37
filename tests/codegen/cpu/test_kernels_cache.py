"""Rotary embedding, writing the cache, and attention that does both, in all modes."""

import numpy as np
import pytest

from helpers.kernels.caches import Heads, expected_attention, in_q4, in_q8, random_cache, spread
from helpers.kernels.workbench import Array, Workbench, assert_close, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.specs import CacheWriteSpec, Mode, RotarySpec

CHUNK = 13
CONTEXT = 50
# Each with a width that it takes.
DTYPES = {"float16": 72, "float32": 72, "q8": 72, "q4": 96}
# Mode, rows, and how many of them count.
ROWS: list[tuple[Mode, int, int]] = [("one", 1, 1), ("chunk", CHUNK, CHUNK), ("chunk", CHUNK, 4), ("sequences", 3, 3)]
KERNELS: list[tuple[Mode, int]] = [("one", 1), ("chunk", CHUNK), ("sequences", 3)]
FUSED = {
    "multi-head": Heads(3, 3, 24, 24, context=CONTEXT, sequences=4),
    "groups": Heads(6, 2, 20, 12, context=CONTEXT, sequences=4, window=9),
    "q8": Heads(2, 2, 40, 40, context=CONTEXT, sequences=4, kv_dtype="q8"),
    "q4": Heads(2, 2, 64, 32, context=CONTEXT, sequences=4, kv_dtype="q4"),
    "parts": Heads(4, 2, 16, 16, context=1100, sequences=4),
    "all options": Heads(6, 2, 20, 12, context=CONTEXT, sequences=4, softcap=5.0, slopes=True, sinks=True),
}
EXTENDING: list[tuple[str, Mode, int, int, bool]] = [
    ("multi-head", "one", 1, 1, False),
    *((name, "one", 1, 1, True) for name in FUSED),
    ("groups", "sequences", 3, 2, True),
    ("q8", "sequences", 3, 3, True),
    ("q4", "sequences", 3, 3, True),
    ("parts", "sequences", 3, 3, True),
]


def rotary(head_dim: int, mode: Mode, rows: int) -> Kernel:
    return cpu.write_kernel(RotarySpec(heads=3, head_dim=head_dim, rows=rows, context=CONTEXT, mode=mode))


def cache_write(kv_dtype: str, mode: Mode, rows: int, head_dim: int | None = None) -> Kernel:
    of_cache = {"context": CONTEXT, "kv_dtype": kv_dtype, "sequences": 4}
    return cpu.write_kernel(CacheWriteSpec(3, head_dim or DTYPES[kv_dtype], rows=rows, mode=mode, **of_cache))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    built = [rotary(head_dim, *case) for case in KERNELS for head_dim in (20, 32)]
    built += [cache_write(kv_dtype, *case) for case in KERNELS for kv_dtype in DTYPES]
    built.append(cache_write("q8", "one", 1, 20))
    built += [FUSED[name].kernel(mode, rows, extend=True, turn=turn) for name, mode, rows, _, turn in EXTENDING]
    return Workbench(tmp_path_factory.mktemp("cache") / "host.so", built)


def places(mode: Mode, tokens: int) -> tuple[list[int], list[int], dict[str, object]]:
    """Positions and slots of rows, and what says so to a kernel."""
    if mode == "sequences":
        positions, slots = [41, 5, 30][:tokens], [2, 3, 0][:tokens]
        return positions, slots, {"positions": np.int32(positions), "slots": np.int32(slots)}
    return list(range(30, 30 + tokens)), [2] * tokens, {}


def angles(context: int, half: int) -> tuple[Array, Array]:
    angle = np.arange(context)[:, None] * 0.7 ** np.arange(half)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def turned(x: Array, cos: Array, sin: Array, positions: list[int]) -> Array:
    """x [tokens, heads, d] in float64."""
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = (np.float64(table[positions][:, None]) for table in (cos, sin))
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


@pytest.mark.parametrize("head_dim", [20, 32])
@pytest.mark.parametrize(("mode", "rows", "tokens"), ROWS)
def test_rotary(workbench: Workbench, head_dim: int, mode: Mode, rows: int, tokens: int) -> None:
    x = uniform(np.random.default_rng(head_dim), tokens, 3 * head_dim)
    cos, sin = angles(CONTEXT, head_dim // 2)
    positions, _, where = places(mode, tokens)
    inputs = {"x": x, "cos": cos, "sin": sin, **where}
    result = workbench.run(rotary(head_dim, mode, rows), inputs, tokens=tokens, position=30)
    expected = turned(x.reshape(tokens, 3, head_dim), cos, sin, positions).reshape(tokens, -1)
    assert_close(result["y"][:tokens], expected, 1e-6)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize(("mode", "rows", "tokens"), ROWS)
def test_cache_write(workbench: Workbench, kv_dtype: str, mode: Mode, rows: int, tokens: int) -> None:
    """As numpy rounds it, or as weights are packed; nothing else is touched."""
    width = DTYPES[kv_dtype]
    x = uniform(np.random.default_rng(tokens), tokens, 3 * width)
    positions, slots, where = places(mode, tokens)
    kernel = cache_write(kv_dtype, mode, rows)
    result = workbench.run(kernel, {"x": x, **where}, tokens=tokens, position=30, slot=2)
    heads, expected = x.reshape(tokens, 3, width), dict[str, np.ndarray]()
    if kv_dtype in ("q8", "q4"):
        expected["cache"], expected["cache_scales"], _ = {"q8": in_q8, "q4": in_q4}[kv_dtype](heads)
    else:
        expected["cache"] = heads.astype(kv_dtype)
    for name, values in expected.items():
        cache = result[name]
        if kv_dtype == "q4":  # sums of 32 numbers in another order: a few are nearer to another code
            assert np.mean(cache[slots, :, positions] != values) < 0.01
        else:
            assert np.array_equal(cache[slots, :, positions], values)
        cache[slots, :, positions] = 0
        left = cache.view(np.uint8).reshape(4, 3, CONTEXT, -1)
        left[slots, :, positions] = 255
        assert (left == 255).all()


def test_q8_errors_are_within_their_bound(workbench: Workbench) -> None:
    """Numbers of all sizes, zero included: each is off by 1/254 of the largest of its 32, and 4e-6, at most."""
    rng = np.random.default_rng(0)
    for size in (0.0, 1e-12, 1e-8, 1e-6, 1e-4, 3e-3, 1.0, 300.0, 5e5):
        x = (size * uniform(rng, 1, 60)).reshape(1, 60)
        result = workbench.run(cache_write("q8", "one", 1, 20), {"x": x}, position=7, slot=1)
        data, scales = result["cache"][1, :, 7].astype(np.float64), result["cache_scales"][1, :, 7].astype(np.float64)
        heads = x.reshape(3, 20).astype(np.float64)
        bound = np.abs(heads).max(axis=-1, keepdims=True) / 254 * (1 + 2**-9) + 4e-6
        assert (np.abs(data * scales - heads) <= bound).all()


def test_q4_errors_are_within_their_bound(workbench: Workbench) -> None:
    """Each number is off by 1/16 of the largest of its 32 at most, or by 1/8 at the end of the grid that is nearer."""
    rng = np.random.default_rng(0)
    for size in (0.0, 1e-6, 1e-3, 1.0, 300.0, 5e4):
        x = (size * uniform(rng, 1, 3 * 96)).reshape(1, -1)
        result = workbench.run(cache_write("q4", "one", 1), {"x": x}, position=7, slot=1)
        data, scales = result["cache"][1, :, 7].reshape(3, 3, 16), result["cache_scales"][1, :, 7].astype(np.float64)
        codes = np.concatenate([data & 15, data >> 4], axis=-1).astype(np.float64) - 8
        heads = spread(x).reshape(3, 3, 32)
        largest = np.abs(heads).max(axis=-1, keepdims=True)
        error = np.abs(codes * scales[..., None] - heads)
        assert (error <= largest / 8 * (1 + 2**-9) + 1e-6).all()
        assert np.mean(error > largest / 16 * (1 + 2**-9) + 1e-6) < 0.1


def extended(shape: Heads, mode: Mode, tokens: int, turn: bool) -> tuple[dict[str, Array], Array, list[int], list[int]]:
    """Arguments of a kernel that extends the cache, and what it is to give."""
    rng = np.random.default_rng(tokens)
    positions, slots, where = places(mode, tokens)
    positions = [position + shape.context - CONTEXT for position in positions]
    where = {"positions": np.int32(positions), "slots": np.int32(slots)} if where else {}
    filled = [0] * shape.sequences
    for slot, position in zip(slots, positions, strict=True):
        filled[slot] = position
    options = shape.options(rng)
    q = 3 * uniform(rng, tokens, shape.heads * shape.head_dim)
    k, v = (uniform(rng, tokens, shape.kv_heads * width) for width in (shape.head_dim, shape.value_dim))
    cos, sin = angles(shape.context, shape.head_dim // 2)
    cached = {side: random_cache(rng, shape, side, filled) for side in "kv"}
    new = {"q": q.reshape(tokens, shape.heads, -1), "k": k.reshape(tokens, shape.kv_heads, -1)}
    if turn:
        new = {name: turned(x, cos, sin, positions) for name, x in new.items()}
    new["v"] = v.reshape(tokens, shape.kv_heads, -1)
    expected = np.empty((tokens, shape.heads * shape.value_dim))
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        for side in "kv":
            cached[side].values[slot, :, position] = new[side][row]
        query = new["q"][row].reshape(1, -1).astype(np.float32)
        values = (cached[side].values[slot] for side in "kv")
        expected[row] = expected_attention(shape, query, *values, position, options)[0]
    inputs = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, **where, **options}
    for each in cached.values():
        inputs |= each.arguments
    return inputs, expected, positions, slots


@pytest.mark.parametrize(("name", "mode", "rows", "tokens", "turn"), EXTENDING)
def test_attention_that_extends_the_cache(
    workbench: Workbench, name: str, mode: Mode, rows: int, tokens: int, turn: bool
) -> None:
    shape = FUSED[name]
    inputs, expected, positions, slots = extended(shape, mode, tokens, turn)
    kernel = shape.kernel(mode, rows, extend=True, turn=turn)
    result = workbench.run(kernel, inputs, tokens=tokens, position=positions[0], slot=slots[0])
    # New keys and values are rounded to what the cache holds.
    assert_close(result["y"][:tokens], expected, {"float16": 2e-3, "q8": 2e-2, "q4": 0.3}[shape.kv_dtype])
    for argument in ("k_cache", "v_cache"):
        before, after = inputs[argument], result[argument].copy()
        assert (after[slots, :, positions] != before[slots, :, positions]).any()
        after[slots, :, positions] = before[slots, :, positions]
        assert np.array_equal(after.view(np.uint8), before.view(np.uint8)), "what was there has changed"
    again = workbench.run(kernel, inputs, tokens=tokens, position=positions[0], slot=slots[0], threads=3)
    assert all(np.array_equal(again[name].view(np.uint8), result[name].view(np.uint8)) for name in ("y", "k_cache"))
