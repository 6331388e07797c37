"""Translated PTX instructions, each on many values, compared with numpy: what the PTX ISA says of their edges."""

import struct
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.kernels.emulator import Emulated
from helpers.ptx.syntax import parse
from helpers.ptx.translate import source_of

Words = NDArray[np.uint64]
Values = NDArray[np.generic]
INTEGERS = [0, 1, 2, 5, 31, 32, 33, 64, 255, 0x7FFF, 0x8000, 0x12345678, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
FLOATS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3e9, -3e9, 1e-40, -1e-40, 2.0**-25, 65519.0, 65520.0, 1e30),
    *(np.inf, -np.inf, np.nan, 2147483520.0, -150.0, 127.5),
]


class Case(NamedTuple):
    """`code` has sources %rd1 to %rd3, %r1 to %r3, %f1 to %f3 and %rs1 to %rs3, all of them the low bits of the same
    words, and sets `result`. `expected` gets the words."""

    code: str
    result: str
    expected: Callable[[Words, Words, Words], Values]


def u32(words: Words) -> NDArray[np.uint32]:
    return words.astype(np.uint32)


def s32(words: Words) -> NDArray[np.int32]:
    return u32(words).view(np.int32)


def s64(words: Words) -> NDArray[np.int64]:
    return words.view(np.int64)


def f32(words: Words) -> NDArray[np.float32]:
    return u32(words).view(np.float32)


def negated(words: Words) -> Words:
    """Floats with the other sign."""
    return words ^ np.uint64(1 << 31)


def shifted(words: NDArray[np.integer], places: NDArray[np.int64], bits: int) -> NDArray[np.object_]:
    """Python's integers shifted to the right, or to the left by negative places, by no more than `bits`."""
    pairs = zip(words.tolist(), places.tolist(), strict=True)
    return np.array([w >> min(n, bits) if n >= 0 else w << min(-n, bits) for w, n in pairs], object)


def chosen_bytes(a: Words, b: Words, c: Words) -> NDArray[np.uint32]:
    """As the ISA writes "prmt" in its default mode."""
    found = []
    for x, y, selectors in zip(u32(a).tolist(), u32(b).tolist(), u32(c).tolist(), strict=True):
        source, result = struct.pack("<II", x, y), 0
        for i in range(4):
            selector = selectors >> 4 * i & 15
            byte = source[selector & 7]
            result |= (0xFF * (byte >> 7) if selector & 8 else byte) << 8 * i
        found.append(result)
    return np.array(found, np.uint32)


def inserted(a: Words, b: Words, c: Words) -> NDArray[np.uint32]:
    """As the ISA writes "bfi", bit by bit; the length is %r3 / 256."""
    found = []
    for x, y, place in zip(u32(a).tolist(), u32(b).tolist(), u32(c).tolist(), strict=True):
        start, length = place & 255, place >> 8 & 255
        for i in range(min(length, 32)):
            if start + i < 32:
                y = y & ~(1 << start + i) | (x >> i & 1) << start + i
        found.append(y)
    return np.array(found, np.uint32)


def fma_down(a: Words, b: Words, c: Words) -> NDArray[np.float32]:
    """a b + c, rounded down from the exact sum."""
    found = []
    for x, y, z in zip(f32(a).tolist(), f32(b).tolist(), f32(c).tolist(), strict=True):
        if not np.isfinite([x, y, z]).all():
            found.append(np.float32(np.float64(x) * np.float64(y) + z))
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        # "Rounding direction" of IEEE 754: a sum that is exactly 0 is -0, unless both terms are +0.
        zero = -0.0 if np.signbit(x * y) or np.signbit(z) else 0.0
        rounded = np.float32(float(exact) or zero)
        if np.isposinf(rounded) or (np.isfinite(rounded) and Fraction(float(rounded)) > exact):
            rounded = np.nextafter(rounded, np.float32(-np.inf))
        found.append(rounded)
    return np.array(found, np.float32)


def larger(a: Words, b: Words) -> NDArray[np.float32]:
    """The larger one; +0 is larger than -0, and a number than NaN."""
    x, y = f32(a), f32(b)
    zeros = np.where(np.signbit(x), y, x)
    found = np.where((x == 0) & (y == 0), zeros, np.fmax(x, y))
    return np.where(np.isnan(x) & np.isnan(y), np.uint32(0x7FFFFFFF).view(np.float32), found).astype(np.float32)


def to_int(values: NDArray[np.float32], lowest: int, highest: int) -> NDArray[np.int64]:
    """Truncated integers between limits; NaN becomes 0."""
    clipped = np.clip(np.nan_to_num(values.astype(np.float64), nan=0.0), lowest, highest)
    return np.trunc(clipped).astype(np.int64)


def halves(low: Words, high: Words) -> NDArray[np.uint32]:
    with np.errstate(over="ignore"):
        parts = [f32(each).astype(np.float16).view(np.uint16).astype(np.uint32) for each in (low, high)]
    return parts[0] | parts[1] << np.uint32(16)


def pairs(words: Words) -> NDArray[np.float64]:
    return u32(words).view(np.float16).reshape(-1, 2).astype(np.float64)


def packed(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32).reshape(-1)


EXP_LIMIT = 2.0**-126
INTEGER_CASES = {
    "add": Case("add.s32 %r4, %r1, %r2;", "%r4", lambda a, b, c: u32(a) + u32(b)),
    "sub64": Case("sub.s64 %rd4, %rd1, %rd2;", "%rd4", lambda a, b, c: a - b),
    "mul lo": Case("mul.lo.s32 %r4, %r1, %r2;", "%r4", lambda a, b, c: u32(a) * u32(b)),
    "mul lo 16": Case("mul.lo.s16 %rs4, %rs1, %rs2;", "%rs4", lambda a, b, c: (u32(a) * u32(b)).astype(np.uint16)),
    "mul hi": Case("mul.hi.s32 %r4, %r1, %r2;", "%r4", lambda a, b, c: (s32(a) * s32(b).astype(np.int64)) >> 32),
    "mul hi u": Case("mul.hi.u32 %r4, %r1, %r2;", "%r4", lambda a, b, c: (u32(a) * u32(b).astype(np.uint64)) >> 32),
    "mul wide": Case("mul.wide.s32 %rd4, %r1, %r2;", "%rd4", lambda a, b, c: s32(a) * s32(b).astype(np.int64)),
    "mul wide u": Case("mul.wide.u32 %rd4, %r1, %r2;", "%rd4", lambda a, b, c: u32(a) * u32(b).astype(np.uint64)),
    "mul wide 16": Case("mul.wide.u16 %r4, %rs1, %rs2;", "%r4", lambda a, b, c: (u32(a) & 65535) * (u32(b) & 65535)),
    "mad": Case("mad.lo.s32 %r4, %r1, %r2, %r3;", "%r4", lambda a, b, c: u32(a) * u32(b) + u32(c)),
    "mad wide": Case(
        "mad.wide.s32 %rd4, %r1, %r2, %rd3;", "%rd4", lambda a, b, c: s32(a) * s32(b).astype(np.int64) + s64(c)
    ),
    "min": Case("min.s32 %r4, %r1, %r2;", "%r4", lambda a, b, c: np.minimum(s32(a), s32(b))),
    "max u": Case("max.u32 %r4, %r1, %r2;", "%r4", lambda a, b, c: np.maximum(u32(a), u32(b))),
    "shl": Case("shl.b32 %r4, %r1, %r2;", "%r4", lambda a, b, c: shifted(u32(a), -u32(b).astype(np.int64), 32)),
    "shl 64": Case("shl.b64 %rd4, %rd1, %r2;", "%rd4", lambda a, b, c: shifted(a, -u32(b).astype(np.int64), 64)),
    "shr": Case("shr.u32 %r4, %r1, %r2;", "%r4", lambda a, b, c: shifted(u32(a), u32(b).astype(np.int64), 32)),
    "shr s": Case("shr.s32 %r4, %r1, %r2;", "%r4", lambda a, b, c: shifted(s32(a), u32(b).astype(np.int64), 31)),
    "shr 16": Case(
        "shr.u16 %rs4, %rs1, %r2;", "%rs4", lambda a, b, c: shifted(a & np.uint64(65535), u32(b).astype(np.int64), 16)
    ),
    "funnel": Case(
        "shf.l.wrap.b32 %r4, %r1, %r2, %r3;",
        "%r4",
        lambda a, b, c: (u32(b).astype(np.uint64) << 32 | u32(a)) << (u32(c) & 31) >> 32,
    ),
    "funnel clamp": Case(
        "shf.r.clamp.b32 %r4, %r1, %r2, %r3;",
        "%r4",
        lambda a, b, c: (u32(b).astype(np.uint64) << 32 | u32(a)) >> np.minimum(u32(c), 32),
    ),
    "prmt": Case("prmt.b32 %r4, %r1, %r2, %r3;", "%r4", chosen_bytes),
    "prmt code": Case(
        "prmt.b32 %r4, %r1, 1684300900, 0x4342;", "%r4",
        lambda a, b, c: (u32(a) >> 16 & 255) | u32(a) >> 24 << 16 | np.uint32(0x64006400),
    ),
    "bfi": Case("shr.u32 %r5, %r3, 8;\nbfi.b32 %r4, %r1, %r2, %r3, %r5;", "%r4", inserted),
    "popc": Case("popc.b32 %r4, %r1;", "%r4", lambda a, b, c: np.array([bin(x).count("1") for x in u32(a)])),
    "dp2a": Case(
        "dp2a.lo.u32.u32 %r4, %r1, %r2, %r3;", "%r4",
        lambda a, b, c: u32(c) + (u32(a) & 65535) * (u32(b) & 255) + (u32(a) >> 16) * (u32(b) >> 8 & 255),
    ),
    "less": Case("setp.lt.s32 %p1, %r1, %r2;", "%p1", lambda a, b, c: s32(a) < s32(b)),
    "less u": Case("setp.lt.u32 %p1, %r1, %r2;", "%p1", lambda a, b, c: u32(a) < u32(b)),
    "less 64": Case("setp.ge.s64 %p1, %rd1, %rd2;", "%p1", lambda a, b, c: s64(a) >= s64(b)),
    "select": Case(
        "setp.ne.s16 %p1, %rs1, 0;\nselp.b32 %r4, %r2, -7, %p1;", "%r4",
        lambda a, b, c: np.where(u32(a) & 65535, s32(b), -7),
    ),
    "negated": Case("not.b32 %r5, %r1;\nneg.s32 %r4, %r5;", "%r4", lambda a, b, c: u32(a) + np.uint32(1)),
    "predicates": Case(
        "setp.eq.s32 %p2, %r1, %r2;\nsetp.gt.u32 %p3, %r1, 32;\nxor.pred %p1, %p2, %p3;", "%p1",
        lambda a, b, c: (u32(a) == u32(b)) ^ (u32(a) > 32),
    ),
    "cut": Case("cvt.u16.u32 %rs4, %r1;", "%rs4", lambda a, b, c: u32(a) & 65535),
    "byte": Case("cvt.s32.s8 %r4, %r1;", "%r4", lambda a, b, c: u32(a).astype(np.uint8).view(np.int8)),
    "extended": Case("cvt.s64.s32 %rd4, %r1;", "%rd4", lambda a, b, c: s32(a)),
    "wide result": Case("cvt.s8.s32 %rs4, %r1;", "%rs4", lambda a, b, c: u32(a).astype(np.uint8).view(np.int8)),
    "pack": Case("mov.b32 %r4, {%rs1, %rs2};", "%r4", lambda a, b, c: u32(a) & 65535 | u32(b) << np.uint32(16)),
    "unpack": Case("mov.b32 {%rs5, %rs4}, %r1;", "%rs4", lambda a, b, c: u32(a) >> 16),
    "unpack 64": Case("mov.b64 {%r5, %r4}, %rd1;", "%r4", lambda a, b, c: a >> np.uint64(32)),
}  # fmt: skip
FLOAT_CASES = {
    "fma": Case(
        "fma.rn.f32 %f4, %f1, %f2, %f3;", "%f4",
        lambda a, b, c: np.array([_fma(*each) for each in zip(f32(a), f32(b), f32(c), strict=True)], np.float32),
    ),
    "fma down": Case("fma.rm.f32 %f4, %f1, %f2, %f3;", "%f4", fma_down),
    "fma up": Case(
        "fma.rp.f32 %f4, %f1, %f2, %f3;", "%f4", lambda a, b, c: -fma_down(negated(a), b, negated(c))
    ),
    "div": Case("div.rn.f32 %f4, %f1, %f2;", "%f4", lambda a, b, c: f32(a) / f32(b)),
    "rcp": Case("rcp.rn.f32 %f4, %f1;", "%f4", lambda a, b, c: np.float32(1) / f32(a)),
    "max": Case("max.f32 %f4, %f1, %f2;", "%f4", lambda a, b, c: larger(a, b)),
    "min": Case(
        "min.f32 %f4, %f1, %f2;", "%f4", lambda a, b, c: -larger(negated(a), negated(b))
    ),
    "exp2": Case(
        "ex2.approx.ftz.f32 %f4, %f1;", "%f4",
        lambda a, b, c: np.where((found := np.exp2(f32(a).astype(np.float64))) < EXP_LIMIT, 0, found),
    ),
    "saturated": Case("cvt.sat.f32.f32 %f4, %f1;", "%f4", lambda a, b, c: np.clip(np.nan_to_num(f32(a)), 0, 1) + 0.0),
    "even": Case("cvt.rni.f32.f32 %f4, %f1;", "%f4", lambda a, b, c: np.rint(f32(a))),
    "integer": Case("cvt.rzi.s32.f32 %r4, %f1;", "%r4", lambda a, b, c: to_int(f32(a), -(2**31), 2**31 - 1)),
    "unsigned": Case("cvt.rzi.u32.f32 %r4, %f1;", "%r4", lambda a, b, c: to_int(f32(a), 0, 2**32 - 1)),
    "half": Case(
        "{.reg .f16 low;\ncvt.rn.f16.f32 low, %f1;\nmov.b16 %rs4, low;}", "%rs4",
        lambda a, b, c: halves(a, a) & 65535,
    ),
    "halves": Case("cvt.rn.f16x2.f32 %r4, %f1, %f2;", "%r4", lambda a, b, c: halves(b, a)),
    "float": Case("cvt.f32.f16 %f4, %rs1;", "%f4", lambda a, b, c: pairs(a)[:, 0]),
    "sum of pairs": Case("add.f16x2 %r4, %r1, %r2;", "%r4", lambda a, b, c: packed(pairs(a) + pairs(b))),
    "fma of pairs": Case(
        "fma.rn.f16x2 %r4, %r1, %r2, %r3;", "%r4", lambda a, b, c: packed(pairs(a) * pairs(b) + pairs(c))
    ),
    "equal": Case("setp.eq.f32 %p1, %f1, %f2;", "%p1", lambda a, b, c: f32(a) == f32(b)),
    "ordered": Case("setp.ne.f32 %p1, %f1, %f2;", "%p1", lambda a, b, c: (f32(a) < f32(b)) | (f32(a) > f32(b))),
    "unordered": Case("setp.neu.f32 %p1, %f1, %f2;", "%p1", lambda a, b, c: f32(a) != f32(b)),
    "at most": Case("setp.leu.f32 %p1, %f1, %f2;", "%p1", lambda a, b, c: ~(f32(a) > f32(b))),
    "at least": Case("setp.ge.f32 %p1, %f1, 0f3F800000;", "%p1", lambda a, b, c: f32(a) >= 1),
    "sign": Case("neg.f32 %f5, %f1;\nabs.f32 %f4, %f5;", "%f4", lambda a, b, c: np.abs(f32(a))),
}  # fmt: skip
CASES = INTEGER_CASES | FLOAT_CASES
# Results that are halves, whose NaN may have any bits.
HALVES = {"half", "halves", "sum of pairs", "fma of pairs"}
_STORES = {
    "%rd": "mov.u64 %rd9, %rd4;",
    "%r": "cvt.u64.u32 %rd9, %r4;",
    "%rs": "cvt.u64.u16 %rd9, %rs4;",
    "%f": "mov.b32 %r9, %f4;\ncvt.u64.u32 %rd9, %r9;",
    "%p": "selp.u64 %rd9, 1, 0, %p1;",
}
_LOADS = "\n".join(
    f"ld.param.u64 %rd1{i}, [{{name}}_param_{i}];\nadd.s64 %rd1{i}, %rd1{i}, %rd8;\n" + text
    for i, text in enumerate(
        f"ld.global.u64 %rd{i}, [%rd1{i - 1}];\ncvt.u32.u64 %r{i}, %rd{i};\n"
        f"cvt.u16.u32 %rs{i}, %r{i};\nmov.b32 %f{i}, %r{i};"
        for i in (1, 2, 3)
    )
)


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a b + c, rounded once: a sum of doubles may be rounded twice."""
    if not np.isfinite([a, b, c]).all():
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return a * b + c
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    if not np.isfinite(around).all():
        return near
    return min(around, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.uint32)) & 1))


def kernel(name: str, case: Case) -> str:
    """A kernel whose thread i has word i of each of three arrays."""
    parameters = ",\n".join(f".param .u64 {name}_param_{i}" for i in range(4))
    store = _STORES[case.result.rstrip("0123456789")]
    return (
        f".visible .entry {name}({parameters})\n.maxntid 1024, 1, 1\n{{\n"
        ".reg .pred %p<4>;\n.reg .b16 %rs<8>;\n.reg .f32 %f<8>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<24>;\n"
        f"mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 8;\n{_LOADS.format(name=name)}\n{case.code}\n{store}\n"
        f"ld.param.u64 %rd13, [{name}_param_3];\nadd.s64 %rd13, %rd13, %rd8;\nst.global.u64 [%rd13], %rd9;\nret;\n}}\n"
    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    text = "".join(kernel(f"case_{i}", case) for i, case in enumerate(CASES.values()))
    return Emulated(source_of(parse(text)), tmp_path_factory.mktemp("instructions") / "instructions.so")


def words_of(values: list[float] | list[int], seed: int) -> tuple[Words, Words, Words]:
    """All pairs of `values`, each with one more, and random bits in the high half of 64."""
    rng = np.random.default_rng(seed)
    low = np.array(values, np.float32).view(np.uint32) if isinstance(values[0], float) else np.array(values, np.uint32)
    count = len(low) ** 2
    a, b = (each.reshape(-1).astype(np.uint64) for each in np.meshgrid(low, low))
    high = rng.integers(0, 2**32, (3, count), np.uint64) << np.uint64(32)
    return a | high[0], b | high[1], rng.choice(low, count).astype(np.uint64) | high[2]


def check_floats(found: NDArray[np.float32], expected: NDArray[np.float32], most_ulps: int) -> None:
    """Zeros have the right sign; NaN may have any bits."""
    for kind in (np.isnan, np.isinf):
        np.testing.assert_array_equal(kind(found), kind(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])
    np.testing.assert_array_max_ulp(found[np.isfinite(expected)], expected[np.isfinite(expected)], most_ulps)


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")
def test_an_instruction(kernels: Emulated, name: str) -> None:
    case, is_float = CASES[name], name in FLOAT_CASES
    a, b, c = words_of(FLOATS if is_float else INTEGERS, seed=1)
    out = np.zeros_like(a)
    kernels.launch(f"case_{list(CASES).index(name)}", (1, 1, 1), (len(a), 1, 1), [a, b, c, out])
    expected = case.expected(a, b, c)
    if case.result == "%f4":
        check_floats(f32(out), expected.astype(np.float32), most_ulps=2 if name == "exp2" else 0)
        if name in ("max", "min"):
            assert set(u32(out)[np.isnan(f32(out))].tolist()) == {0x7FFFFFFF}
        return
    bits = {"%rd4": 64, "%r4": 32, "%rs4": 16, "%p1": 1}[case.result]
    whole, found = [int(each) % 2**bits for each in expected.tolist()], out.tolist()
    if name in HALVES:
        whole, found = one_nan(whole), one_nan(found)
    assert found == whole


def one_nan(words: list[int]) -> list[int]:
    """Pairs of halves in which each NaN has the same bits."""
    halves = [(word & 0xFFFF, word >> 16) for word in words]
    one = [tuple(0x7FFF if half & 0x7FFF > 0x7C00 else half for half in pair) for pair in halves]
    return [low | high << 16 for low, high in one]
