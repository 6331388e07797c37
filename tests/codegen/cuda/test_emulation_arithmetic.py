"""Numbers of the emulation: halves rounded as IEEE 754 says, and what CUDA computes with the bits of integers."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.emulator import Emulated

SOURCE = Path(__file__).parent / "arithmetic.cu"
BLOCK = 64


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(SOURCE.read_text(), tmp_path_factory.mktemp("arithmetic") / "arithmetic.so")


def run(kernels: Emulated, symbol: str, *arrays: np.ndarray) -> None:
    kernels.launch(symbol, (len(arrays[0]) // BLOCK, 1, 1), (BLOCK, 1, 1), arrays)


def every_half() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)


def assert_same_bits(measured: np.ndarray, expected: np.ndarray) -> None:
    """Which NaN it is does not matter."""
    assert measured.dtype == expected.dtype
    same = (measured.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(measured) & np.isnan(expected))
    wrong = np.flatnonzero(~same)
    assert len(wrong) == 0, f"{len(wrong)} differ: {measured[wrong[:3]]} are not {expected[wrong[:3]]}"


def test_every_half_as_a_float(kernels: Emulated) -> None:
    x, out = every_half(), np.zeros(1 << 16, np.float32)
    run(kernels, "half_to_float", x, out)
    np.testing.assert_array_equal(out, x.astype(np.float32))
    assert np.signbit(out[0x8000])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_to_halves(kernels: Emulated, dtype: type) -> None:
    """Around every half, halfway to the next one, and just above and below that."""
    low = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(dtype)
    middle = low + np.diff(low, append=dtype(65536)) / 2
    points = [low, middle, np.nextafter(middle, dtype(np.inf)), np.nextafter(middle, dtype(0))]
    x = np.concatenate([*points, *[-p for p in points], np.full(64, np.inf), np.full(64, np.nan)]).astype(dtype)
    out = np.zeros(len(x), np.float16)
    run(kernels, "float_to_half" if dtype is np.float32 else "double_to_half", x, out)
    with np.errstate(over="ignore"):
        assert_same_bits(out, x.astype(np.float16))


def test_arithmetic_of_halves_is_rounded_correctly(kernels: Emulated) -> None:
    """float64 holds sums and products of halves exactly, and quotients and roots closely enough to round them."""
    rng = np.random.default_rng(11)
    a, b = (rng.integers(0, 1 << 16, 6400, dtype=np.uint16).view(np.float16) for _ in range(2))
    out = np.zeros((7, 6400), np.float16)
    run(kernels, "half_arithmetic", a, b, np.array([6400], np.int32), out)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = [x + y, x - y, x * y, x / y, np.sqrt(np.abs(x)), -x, np.where(x < y, x, y)]
        for row, value in zip(out, expected, strict=True):
            assert_same_bits(row, value.astype(np.float16))


def nearest_half(exact: Fraction) -> np.float16:
    """Return the float16 nearest to `exact`, which is within its range; in the middle, the even one."""
    near = np.float16(float(exact))
    candidates = [near, np.nextafter(near, np.float16(np.inf)), np.nextafter(near, np.float16(-np.inf))]
    finite = [half for half in candidates if np.isfinite(half)]
    return min(finite, key=lambda half: (abs(Fraction(float(half)) - exact), int(half.view(np.uint16)) & 1))


def test_half_products_and_sums_are_rounded_once(kernels: Emulated) -> None:
    """Random ones, and products halfway between two halves with the smallest addend in either direction."""
    rng, count = np.random.default_rng(12), 1280
    a, b, c = (rng.normal(0, 30, count).astype(np.float16) for _ in range(3))
    # (1 + 2^-5)(1 + 2^-6) = 1 + 48/1024 + 2^-11: its last bit is half of a half's.
    a[:64], b[:64] = 1 + 2**-5, 1 + 2**-6
    c[:64] = np.tile(np.array([2**-24, -(2**-24), 0, 2**-14], np.float16), 16)
    out = np.zeros((5, count), np.float16)
    run(kernels, "half_pairs", *(v.view(np.uint32) for v in (a, b, c)), np.array([count // 2], np.int32), out)
    for i in range(count):
        product = Fraction(float(a[i])) * Fraction(float(b[i]))
        exact = product + Fraction(float(c[i]))
        assert out[0, i] == nearest_half(exact), f"{a[i]} * {b[i]} + {c[i]}"
        assert out[2, i] == nearest_half(product)
    np.testing.assert_array_equal(out[1], a + b)
    np.testing.assert_array_equal(out[3].reshape(-1, 2), np.stack([a[1::2], b[::2]], axis=1))
    np.testing.assert_array_equal(out[4].reshape(-1, 2), a.reshape(-1, 2)[:, ::-1])


def test_integer_bit_functions(kernels: Emulated) -> None:
    rng = np.random.default_rng(13)
    x = rng.integers(-(2**31), 2**31, 640, dtype=np.int64).astype(np.int32) >> rng.integers(0, 31, 640, dtype=np.int32)
    x[:34] = [0, -1, *[(1 << bit) - (bit == 31) * 2**32 for bit in range(32)]]
    out = np.full((6, 640), -99, np.int32)
    run(kernels, "bits", x, np.array([640], np.int32), out)
    words = [int(word) for word in x.view(np.uint32)]
    binary = [f"{word:032b}" for word in words]
    assert list(out[0]) == [text.count("1") for text in binary]
    assert list(out[1]) == [32 - word.bit_length() for word in words]
    assert list(out[2]) == [(word & -word).bit_length() for word in words]
    assert list(out[3].view(np.uint32)) == [int(text[::-1], 2) for text in binary]
    assert list(out[4].view(np.uint32)) == [permuted(word, 0x9360) for word in words]
    np.testing.assert_array_equal(out[5], x)


def permuted(word: int, selectors: int) -> int:
    """__byte_perm(word, ~word, selectors) by CUDA's "Integer Intrinsics"; 8 in a selector repeats the byte's sign."""
    either = [*word.to_bytes(4, "little"), *(~word & 0xFFFFFFFF).to_bytes(4, "little")]
    chosen = [either[selectors >> 4 * i & 7] for i in range(4)]
    signs = [selectors >> 4 * i & 8 for i in range(4)]
    result = [(255 if byte & 128 else 0) if sign else byte for byte, sign in zip(chosen, signs, strict=True)]
    return int.from_bytes(bytes(result), "little")


def test_dot_products_of_four_bytes(kernels: Emulated) -> None:
    rng = np.random.default_rng(14)
    a, b = (rng.integers(-128, 128, (640, 4), dtype=np.int64).astype(np.int8) for _ in range(2))
    a[0], b[0] = -128, -128
    c = rng.integers(-(2**30), 2**30, 640).astype(np.int32)
    out = np.zeros((2, 640), np.int32)
    run(kernels, "dots", a.view(np.int32)[:, 0], b.view(np.int32)[:, 0], c, np.array([640], np.int32), out)
    np.testing.assert_array_equal(out[0], c + (a.astype(np.int64) * b).sum(axis=1))
    unsigned = c.view(np.uint32) + (a.view(np.uint8).astype(np.int64) * b.view(np.uint8)).sum(axis=1)
    np.testing.assert_array_equal(out[1].view(np.uint32), unsigned % 2**32)


def test_math_functions_are_within_two_ulp(kernels: Emulated) -> None:
    """Within 2 units in the last place of float32: the bounds of glibc's functions, and of `rsqrtf` computed in double.

    Those of a GPU are wider, and tests that depend on these must be too.
    """
    x = np.random.default_rng(15).uniform(-8, 8, 640).astype(np.float32)
    out = np.full((11, 640), np.nan, np.float32)
    run(kernels, "functions", x, np.array([640], np.int32), out)
    d = x.astype(np.float64)
    size = np.abs(d)
    limited = np.maximum(x, np.float32(0.5)) + np.minimum(x.astype(np.int32), 3).astype(np.float32)
    erf = np.array([math.erf(value) for value in d])
    expected = [np.exp(d), np.exp2(d), np.tanh(d), erf, size**-0.5, size**0.75, np.floor(d), np.exp(d), size**0.5]
    expected += [d * d - 1, limited]
    for row, value in zip(out, expected, strict=True):
        np.testing.assert_allclose(row, value, rtol=2 * 2.0**-23)


def test_vector_types_of_generated_code(kernels: Emulated) -> None:
    x = np.random.default_rng(16).standard_normal(512).astype(np.float16)
    out = np.full(512, np.nan, np.float32)
    kernels.launch("vectors", (2, 1, 1), (32, 1, 1), [x, out])
    np.testing.assert_array_equal(out, x.astype(np.float32))
