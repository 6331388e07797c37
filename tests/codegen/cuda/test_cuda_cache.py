"""Rotary embedding and writing the cache on a GPU, in all modes."""

import numpy as np
import pytest

from helpers.kernels.caches import in_q8
from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import Array, assert_close, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel
from picompile_codegen.specs import CacheWriteSpec, Mode, RotarySpec

CHUNK = 7
CONTEXT = 50
SEQUENCES = 4
HEADS = 5
DTYPES = ("float16", "float32", "q8")
# Mode, rows, and how many of them count.
ROWS: list[tuple[Mode, int, int]] = [
    ("one", 1, 1),
    ("chunk", CHUNK, CHUNK),
    ("chunk", CHUNK, 4),
    ("sequences", 3, 3),
    ("sequences", 3, 2),
]
KERNELS: list[tuple[Mode, int]] = [("one", 1), ("chunk", CHUNK), ("sequences", 3)]
# A group with a rest, less than one, and whole ones.
HEAD_DIMS = (72, 20, 64)


def rotary(head_dim: int, mode: Mode, rows: int) -> CudaKernel:
    return cuda.write_kernel(RotarySpec(heads=HEADS, head_dim=head_dim, rows=rows, context=CONTEXT, mode=mode))


def cache_write(kv_dtype: str, mode: Mode, rows: int, head_dim: int = 72, sequences: int = SEQUENCES) -> CudaKernel:
    return cuda.write_kernel(
        CacheWriteSpec(
            kv_heads=HEADS,
            head_dim=head_dim,
            context=CONTEXT,
            rows=rows,
            kv_dtype=kv_dtype,
            mode=mode,
            sequences=sequences,
        )
    )


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    built = [rotary(head_dim, *case) for case in KERNELS for head_dim in (20, 64)]
    built += [cache_write(kv_dtype, *case) for case in KERNELS for kv_dtype in DTYPES]
    built += [cache_write("q8", "one", 1, head_dim) for head_dim in HEAD_DIMS[1:]]
    built += [cache_write("float16", *case, sequences=1) for case in KERNELS]
    return CudaWorkbench(tmp_path_factory.mktemp("cache") / "device.so", built)


def places(mode: Mode, tokens: int) -> tuple[list[int], list[int], dict[str, Array]]:
    """Positions and slots of rows, and what says so to a kernel."""
    if mode == "sequences":
        positions, slots = [41, 5, 30][:tokens], [2, 3, 0][:tokens]
        return positions, slots, {"positions": np.int32(positions), "slots": np.int32(slots)}
    return list(range(30, 30 + tokens)), [2] * tokens, {}


@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize(("mode", "rows", "tokens"), ROWS)
def test_rotary(workbench: CudaWorkbench, head_dim: int, mode: Mode, rows: int, tokens: int) -> None:
    rng = np.random.default_rng([head_dim, tokens])
    x, half = uniform(rng, tokens, HEADS * head_dim), head_dim // 2
    angle = rng.uniform(0, 7, (CONTEXT, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    positions, _, where = places(mode, tokens)
    inputs = {"x": x, "cos": cos, "sin": sin, **where}
    result = workbench.run(rotary(head_dim, mode, rows), inputs, tokens=tokens, position=30)
    first, second = np.split(x.reshape(tokens, HEADS, head_dim).astype(np.float64), 2, axis=-1)
    c, s = (np.float64(table[positions][:, None]) for table in (cos, sin))
    expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    # Two products and a sum, each rounded to 6e-8.
    assert_close(result["y"][:tokens], expected.reshape(tokens, -1), 1e-6)
    assert np.isnan(result["y"][tokens:]).all()


def assert_written(
    result: dict[str, Array], heads: Array, kv_dtype: str, slots: list[int], positions: list[int]
) -> None:
    """`heads` float32 [tokens, heads, d] as numpy rounds them, or as weights are packed; nothing else is touched."""
    expected = {"cache": heads.astype(kv_dtype)} if kv_dtype != "q8" else {}
    if kv_dtype == "q8":
        expected["cache"], expected["cache_scales"], _ = in_q8(heads)
    for name, values in expected.items():
        cache = result[name]
        assert np.array_equal(cache[slots, :, positions], values)
        left = cache.view(np.uint8).reshape(*cache.shape[:3], -1)
        left[slots, :, positions] = 255
        assert (left == 255).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize(("mode", "rows", "tokens"), ROWS)
def test_cache_write(workbench: CudaWorkbench, kv_dtype: str, mode: Mode, rows: int, tokens: int) -> None:
    x = uniform(np.random.default_rng(tokens), tokens, HEADS * 72)
    positions, slots, where = places(mode, tokens)
    result = workbench.run(cache_write(kv_dtype, mode, rows), {"x": x, **where}, tokens=tokens, position=30, slot=2)
    assert_written(result, x.reshape(tokens, HEADS, 72), kv_dtype, slots, positions)


@pytest.mark.parametrize(("mode", "rows"), KERNELS)
def test_a_single_sequence_asks_for_no_slot(workbench: CudaWorkbench, mode: Mode, rows: int) -> None:
    x = uniform(np.random.default_rng(rows), rows, HEADS * 72)
    positions, _, where = places(mode, rows)
    result = workbench.run(
        cache_write("float16", mode, rows, sequences=1), {"x": x, **where}, tokens=rows, position=30, slot=-1
    )
    assert_written(result, x.reshape(rows, HEADS, 72), "float16", [0] * rows, positions)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-8, 1e-6, 1e-4, 3e-3, 1.0, 300.0, 5e5, 3e7])
def test_q8_of_numbers_of_all_sizes(workbench: CudaWorkbench, head_dim: int, size: float) -> None:
    """The bytes equal the CPU's, from scales that are 0 in float16 to scales that it cannot hold."""
    x = (size * uniform(np.random.default_rng(head_dim), 1, HEADS * head_dim)).astype(np.float32)
    result = workbench.run(cache_write("q8", "one", 1, head_dim), {"x": x}, position=7, slot=1)
    assert_written(result, x.reshape(1, HEADS, head_dim), "q8", [1], [7])
