"""Attention, rotary embedding and the cache against the same in float64."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from workbench import Array, Workbench, assert_close, uniform

from picompile_codegen import kernels
from picompile_codegen.kernels import Kernel

CHUNK = 13


@dataclass(frozen=True)
class Heads:
    """Numbers and widths of heads."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    kv_dtype: str = "float16"
    context: int = 203


SHAPES = {
    "multi-head": Heads(5, 5, 64, 64),
    "groups of 2": Heads(4, 2, 24, 24),
    "groups of 4": Heads(64, 16, 32, 32),
    "one key head": Heads(7, 1, 20, 20),
    "float32": Heads(6, 2, 32, 32, kv_dtype="float32"),
    "narrow values": Heads(4, 4, 40, 12),
    "window": Heads(4, 2, 32, 32, window=70),
    "window of one": Heads(2, 2, 32, 32, window=1),
    "short": Heads(4, 2, 32, 32, context=17),
}
SCALE = 0.3


def kernel_of(name: str, rows: int) -> Kernel:
    shape = SHAPES[name]
    return kernels.attention(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        context=shape.context,
        rows=rows,
        kv_dtype=shape.kv_dtype,
        scale=SCALE,
        window=shape.window,
    )


def rotary(head_dim: int, rows: int) -> Kernel:
    return kernels.rotary(heads=3, head_dim=head_dim, rows=rows, context=50)


def cache_write(kv_dtype: str, rows: int) -> Kernel:
    return kernels.cache_write(kv_heads=3, head_dim=20, context=50, rows=rows, kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    built = [kernel_of(*case) for case in product(SHAPES, (1, CHUNK))]
    built += [rotary(*case) for case in product((20, 32), (1, CHUNK))]
    built += [cache_write(*case) for case in product(("float16", "float32"), (1, CHUNK))]
    return Workbench(tmp_path_factory.mktemp("attention") / "host.so", built)


def random_cache(rng: np.random.Generator, shape: Heads, width: int, filled: int) -> Array:
    """Keys or values of `filled` positions; the rest of the cache is NaN."""
    cache = np.full((shape.kv_heads, shape.context, width), np.nan, shape.kv_dtype)
    cache[:, :filled] = rng.uniform(-1, 1, (shape.kv_heads, filled, width))
    return cache


def expected_attention(
    shape: Heads, q: NDArray[np.float32], keys: Array, values: Array, position: int
) -> NDArray[np.float64]:
    group = shape.heads // shape.kv_heads
    outputs = np.empty((len(q), shape.heads, shape.value_dim))
    for t, head in product(range(len(q)), range(shape.heads)):
        last = position + t
        seen = slice(max(0, last - shape.window + 1) if shape.window else 0, last + 1)
        query = q[t].reshape(shape.heads, -1)[head].astype(np.float64)
        scores = keys[head // group, seen].astype(np.float64) @ query * SCALE
        weights = np.exp(scores - scores.max())
        outputs[t, head] = weights / weights.sum() @ values[head // group, seen].astype(np.float64)
    return outputs.reshape(len(q), -1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (CHUNK, 1), (CHUNK, 6), (CHUNK, CHUNK)])
@pytest.mark.parametrize("position", [0, 3, 63, 64, 150, 190])
def test_attention(workbench: Workbench, name: str, rows: int, tokens: int, position: int) -> None:
    shape = SHAPES[name]
    if position + tokens > shape.context:
        position = shape.context - tokens
    rng = np.random.default_rng([tokens, position])
    # Scores far apart, so that softmax has something to choose from.
    q = 5 * uniform(rng, tokens, shape.heads * shape.head_dim)
    keys = random_cache(rng, shape, shape.head_dim, position + tokens)
    values = random_cache(rng, shape, shape.value_dim, position + tokens)
    inputs = {"q": q, "k_cache": keys, "v_cache": values}
    # A kernel of one row is for one token, whatever the step says: the last token of a prompt runs through some.
    result = workbench.run(kernel_of(name, rows), inputs, tokens=tokens if rows > 1 else -1, position=position)
    assert_close(result["y"][:tokens], expected_attention(shape, q, keys, values, position))


@pytest.mark.parametrize("rows", [1, CHUNK])
def test_attention_has_the_same_bits_for_any_number_of_threads(workbench: Workbench, rows: int) -> None:
    shape = SHAPES["groups of 2"]
    rng = np.random.default_rng(1)
    inputs = {
        "q": uniform(rng, rows, shape.heads * shape.head_dim),
        "k_cache": random_cache(rng, shape, shape.head_dim, 100 + rows),
        "v_cache": random_cache(rng, shape, shape.value_dim, 100 + rows),
    }
    kernel = kernel_of("groups of 2", rows)
    results = [workbench.run(kernel, inputs, tokens=rows, position=100, threads=threads) for threads in (1, 2, 3, 5)]
    assert len({result["y"].tobytes() for result in results}) == 1


@pytest.mark.parametrize("head_dim", [20, 32])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (CHUNK, CHUNK), (CHUNK, 4)])
def test_rotary(workbench: Workbench, head_dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = uniform(rng, tokens, 3 * head_dim)
    angle = np.arange(50)[:, None] * 0.7 ** np.arange(head_dim // 2)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    result = workbench.run(rotary(head_dim, rows), {"x": x, "cos": cos, "sin": sin}, tokens=tokens, position=30)
    first, second = np.split(x.astype(np.float64).reshape(tokens, 3, head_dim), 2, axis=-1)
    c, s = (np.float64(table[30 : 30 + tokens, None]) for table in (cos, sin))
    expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1).reshape(tokens, -1)
    assert_close(result["y"][:tokens], expected, 1e-6)


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (CHUNK, CHUNK), (CHUNK, 4)])
def test_cache_write(workbench: Workbench, kv_dtype: str, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x = uniform(rng, tokens, 60)
    cache = workbench.run(cache_write(kv_dtype, rows), {"x": x}, tokens=tokens, position=30)["cache"]
    expected = x.reshape(tokens, 3, 20).transpose(1, 0, 2).astype(kv_dtype)
    assert np.array_equal(cache[:, 30 : 30 + tokens], expected)
    assert np.isnan(cache[:, :30]).all()
    assert np.isnan(cache[:, 30 + tokens :]).all()
