"""The PTX translator: memory, guards, warps, and instructions on the values at which the PTX ISA has rules of its own.

What is wrong elsewhere shows in the kernels of test_cuda_ptx.py. What the translator does not know is an error.
"""

import math
import struct

import numpy as np
import pytest

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError
from helpers.ptx.syntax import PtxError, parse
from helpers.ptx.translate import source_of

REGISTERS = ".reg .pred %p<8>;\n.reg .b16 %rs<8>;\n.reg .f32 %f<8>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<16>;\n"
# Thread i has the address of the 16 bytes that are its own in %rd1, in the first parameter, and %rd2, in the second.
PLACES = (
    "ld.param.u64 %rd1, [{name}_param_0];\nld.param.u64 %rd2, [{name}_param_1];\nmov.u32 %r0, %tid.x;\n"
    "mul.wide.u32 %rd3, %r0, 16;\nadd.s64 %rd1, %rd1, %rd3;\nadd.s64 %rd2, %rd2, %rd3;\n"
)
BODIES = {
    # Only even threads load; a register that is an operand changes last.
    "guarded": "and.b32 %r1, %r0, 1;\nmov.b32 %r4, -1;\nmov.b32 %r5, -1;\nmov.b32 %r6, -1;\nmov.b32 %r7, -1;\n"
    "setp.eq.s32 %p1, %r1, 0;\n@%p1 ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd1];\n"
    "st.global.v4.u32 [%rd2], {%r7, %r6, %r5, %r4};",
    # Each thread reads what the next one wrote.
    "exchanged": ".shared .align 16 .b8 rows[1024];\nmov.u64 %rd4, rows;\nadd.s64 %rd4, %rd4, %rd3;\n"
    "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd1];\nst.shared.v4.u32 [%rd4], {%r4, %r5, %r6, %r7};\nbar.sync 0;\n"
    "add.s32 %r1, %r0, 1;\nand.b32 %r1, %r1, 63;\nshl.b32 %r1, %r1, 4;\nmov.u32 %r2, rows;\nadd.s32 %r2, %r2, %r1;\n"
    "ld.shared.v2.u32 {%r8, %r9}, [%r2];\nld.shared.u32 %r10, [%r2+8];\nst.global.v2.u32 [%rd2], {%r8, %r9};\n"
    "st.global.u32 [%rd2+8], %r10;",
    # In segments of eight lanes: the exchange with lane own ^ 3, and with a lane of another segment.
    "shuffled": "mov.u32 %r1, 6175;\nmov.u32 %r2, -1;\nshfl.sync.bfly.b32 %r4|%p1, %r0, 3, %r1, %r2;\n"
    "shfl.sync.bfly.b32 %r5|%p2, %r0, 24, %r1, %r2;\nselp.u32 %r6, 1, 0, %p1;\nselp.u32 %r7, 1, 0, %p2;\n"
    "st.global.v4.u32 [%rd2], {%r4, %r5, %r6, %r7};",
    "unset": "st.global.u32 [%rd2], %r8;",
    "beyond": ".shared .align 16 .b8 rows[1008];\nmov.u64 %rd4, rows;\nadd.s64 %rd4, %rd4, %rd3;\n"
    "st.shared.u32 [%rd4], %r0;",
    "raced": ".shared .align 4 .b8 one[4];\nst.shared.u32 [one], %r0;",
    "misaligned": "ld.global.v2.u32 {%r4, %r5}, [%rd1+4];\nst.global.v2.u32 [%rd2], {%r4, %r5};",
}  # fmt: skip
IDS = np.arange(64, dtype=np.uint32)


def module(name: str, body: str) -> str:
    return (
        f"//\n.version 8.7\n.target sm_90\n.address_size 64\n\n.visible .entry {name}(.param .u64 {name}_param_0,\n"
        f".param .u64 {name}_param_1)\n.maxntid 64, 1, 1\n.minnctapersm 2\n{{\n{REGISTERS}{PLACES.format(name=name)}"
        f"{body}\nret;\n\n}}\n\0"
    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    found = [kernel for name, body in BODIES.items() for kernel in parse(module(name, body))]
    return Emulated(source_of(found), tmp_path_factory.mktemp("translation") / "translation.so")


def ran(kernels: Emulated, name: str, order: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The words that each thread read, and those that it wrote: four each."""
    source = np.random.default_rng(1).integers(0, 2**32, (64, 4), np.uint32)
    out = np.full((64, 4), 0xAAAAAAAA, np.uint32)
    kernels.launch(name, (1, 1, 1), (64, 1, 1), [source, out], order)
    return source, out


@pytest.mark.parametrize("order", ORDERS)
def test_kernels(kernels: Emulated, order: int) -> None:
    source, out = ran(kernels, "guarded", order)
    np.testing.assert_array_equal(out, np.where(IDS[:, None] % 2 == 0, source[:, ::-1], 0xFFFFFFFF))
    source, out = ran(kernels, "exchanged", order)
    np.testing.assert_array_equal(out[:, :3], np.roll(source, -1, axis=0)[:, :3])
    _, out = ran(kernels, "shuffled", order)
    # A lane of a later segment has no value for this one, so that the own one stays; an earlier one has.
    inside = IDS % 32 ^ 24 <= IDS % 32 | 7
    np.testing.assert_array_equal(out.T, [IDS ^ 3, np.where(inside, IDS ^ 24, IDS), np.ones_like(IDS), inside])
    _, out = ran(kernels, "unset", order)
    assert set(out[:, 0].tolist()) == {0xFEFEFEFE}, "a register that nothing sets is no zero"


def test_faults_are_found(kernels: Emulated) -> None:
    messages = {"beyond": "outside of all", "raced": "writes shared memory", "misaligned": "aligned to 8 bytes"}
    for name, message in messages.items():
        with pytest.raises(EmulationError, match=message):
            ran(kernels, name)


@pytest.mark.parametrize(
    "body",
    [
        "ld.acquire.gpu.global.u32 %r1, [%rd1];",
        "ld.shared.u32 %r1, [nowhere];",
        "add.ftz.f32 %f1, %f2, %f3;",
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;",
        "bar.sync 1;",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        '.pragma "other";',
    ],
)
def test_what_is_not_known_is_an_error(body: str) -> None:
    """The error names the line and the instruction."""
    text = module("unknown", body)
    with pytest.raises(PtxError, match=f"^line {text.split(body)[0].count(chr(10)) + 1}: "):
        source_of(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        ".extern .shared .align 16 .b8 rows[];",
        ".visible .entry f(.param .u32 f_param_0)\n{\nret;\n}",
        ".visible .entry f()\n.reqntid 64, 1, 1\n{\nret;\n}",
        ".visible .entry f()\n{\nret;\n",
    ],
)
def test_a_module_with_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(PtxError, match=r"no kernel|pointers alone|not known|no statement"):
        parse(f".version 8.7\n.target sm_90\n.address_size 64\n{text}")


Number = int | float
NAN, INF = math.nan, math.inf
# The only NaN that "max" and "min" give.
CANONICAL = 0x7FFFFFFF
# By code: the register that it sets, and rows of sources and what comes of them. The sources are in %rd1 to %rd3; their
# low bits are in %r1 to %r3, %f1 to %f3 and %rs1 to %rs3.
CASES: dict[str, tuple[str, list[tuple[Number, ...]]]] = {
    "shl.b32 %r4, %r1, %r2;": ("%r4", [(3, 31, 1 << 31), (3, 32, 0), (3, 33, 0), (3, -1, 0)]),
    "shl.b64 %rd4, %rd1, %r2;": ("%rd4", [(3, 33, 3 << 33), (3, 64, 0)]),
    "shr.u32 %r4, %r1, %r2;": ("%r4", [(-1, 31, 1), (-1, 32, 0), (-1, 255, 0)]),
    "shr.s32 %r4, %r1, %r2;": ("%r4", [(-8, 1, -4), (-8, 32, -1), (8, 32, 0)]),
    "shr.u16 %rs4, %rs1, %r2;": ("%rs4", [(0x1FFFF, 15, 1), (0xFFFF, 16, 0)]),
    # A selector of 8 or more repeats the byte's sign.
    "prmt.b32 %r4, %r1, %r2, %r3;": (
        "%r4",
        [(0x83828180, 0x87060504, 0x7531, 0x87058381), (0x83828180, 0x7060504, 0x8F04, 0xFF008004)],
    ),
    # Bits beyond the last one are lost; place and length are bytes.
    "bfi.b32 %r4, %r1, %r2, %r3, 8;": (
        "%r4",
        [(0x1AB, 0, 4, 0xAB0), (0xAB, -1, 28, 0xBFFFFFFF), (0xAB, 5, 32, 5), (0xAB, 0, 0x104, 0xAB0)],
    ),
    # Exactly 1 + 2^-24, a little less, and -0 where the exact sum is 0.
    "fma.rm.f32 %f4, %f1, %f2, %f3;": (
        "%f4",
        [
            (1.0, 1.0, 2.0**-24, 1.0),
            (1.0, 1.0, -(2.0**-60), 1 - 2.0**-24),
            (1.0, 1.0, -1.0, -0.0),
            (NAN, 1.0, 1.0, NAN),
        ],
    ),
    "max.f32 %f4, %f1, %f2;": ("%f4", [(NAN, 1.0, 1.0), (1.0, NAN, 1.0), (-0.0, 0.0, 0.0), (NAN, NAN, CANONICAL)]),
    "min.f32 %f4, %f1, %f2;": ("%f4", [(NAN, 1.0, 1.0), (0.0, -0.0, -0.0), (2.0, 1.0, 1.0), (NAN, NAN, CANONICAL)]),
    "ex2.approx.ftz.f32 %f4, %f1;": (
        "%f4",
        [(-150.0, 0.0), (-127.0, 0.0), (-126.0, 2.0**-126), (INF, INF), (1e-40, 1.0)],
    ),
    "cvt.sat.f32.f32 %f4, %f1;": ("%f4", [(NAN, 0.0), (-0.5, 0.0), (0.5, 0.5), (INF, 1.0), (-0.0, 0.0)]),
    "cvt.rni.f32.f32 %f4, %f1;": ("%f4", [(2.5, 2.0), (3.5, 4.0), (-0.25, -0.0)]),
    "cvt.rzi.s32.f32 %r4, %f1;": ("%r4", [(-2.5, -2), (3e9, 2**31 - 1), (-3e9, -(2**31)), (NAN, 0)]),
    "cvt.rzi.u32.f32 %r4, %f1;": ("%r4", [(2.5, 2), (-3.0, 0), (1e30, -1), (NAN, 0), (3e9, 3_000_000_000)]),
    "{.reg .f16 low;\ncvt.rn.f16.f32 low, %f1;\nmov.b16 %rs4, low;}": (
        "%rs4",
        [(1.0, 0x3C00), (65519.0, 0x7BFF), (65520.0, 0x7C00), (2.0**-25, 0), (2.0**-24, 1), (-0.0, 0x8000)],
    ),
    # The first source is the high half.
    "cvt.rn.f16x2.f32 %r4, %f1, %f2;": ("%r4", [(1.0, -2.0, 0x3C00C000)]),
    # (1 + 3 · 2^-10)² - 1, which is rounded once, beside 2 · 3 + 1.
    "fma.rn.f16x2 %r4, %r1, %r2, %r3;": ("%r4", [(0x40003C03, 0x42003C03, 0x3C00BC00, 0x47001E02)]),
    "setp.eq.f32 %p1, %f1, %f2;": ("%p1", [(0.0, -0.0, 1), (NAN, NAN, 0)]),
    "setp.ne.f32 %p1, %f1, %f2;": ("%p1", [(1.0, 2.0, 1), (1.0, NAN, 0)]),
    "setp.neu.f32 %p1, %f1, %f2;": ("%p1", [(1.0, 1.0, 0), (1.0, NAN, 1)]),
    "setp.leu.f32 %p1, %f1, %f2;": ("%p1", [(1.0, 1.0, 1), (2.0, 1.0, 0), (2.0, NAN, 1)]),
}
_STORES = {
    "%rd": "mov.u64 %rd9, %rd4;",
    "%r": "cvt.u64.u32 %rd9, %r4;",
    "%rs": "cvt.u64.u16 %rd9, %rs4;",
    "%f": "mov.b32 %r9, %f4;\ncvt.u64.u32 %rd9, %r9;",
    "%p": "selp.u64 %rd9, 1, 0, %p1;",
}
_BITS = {"%rd4": 64, "%r4": 32, "%f4": 32, "%rs4": 16, "%p1": 1}
_SOURCES = "\n".join(
    f"ld.global.u64 %rd{i}, [%rd10+{8 * i - 8}];\ncvt.u32.u64 %r{i}, %rd{i};\n"
    f"cvt.u16.u32 %rs{i}, %r{i};\nmov.b32 %f{i}, %r{i};"
    for i in (1, 2, 3)
)


def kernel(name: str, code: str, result: str) -> str:
    """A kernel whose thread i has three words from 32 i bytes on, and writes the fourth."""
    return (
        f".visible .entry {name}(.param .u64 words)\n.maxntid 1024, 1, 1\n{{\n"
        ".reg .pred %p<4>;\n.reg .b16 %rs<8>;\n.reg .f32 %f<8>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<24>;\n"
        "mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 32;\nld.param.u64 %rd10, [words];\n"
        f"add.s64 %rd10, %rd10, %rd8;\n{_SOURCES}\n{code}\n{_STORES[result.rstrip('0123456789')]}\n"
        "st.global.u64 [%rd10+24], %rd9;\nret;\n}\n"
    )


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    text = "".join(kernel(f"case_{i}", code, result) for i, (code, (result, _)) in enumerate(CASES.items()))
    return Emulated(source_of(parse(text)), tmp_path_factory.mktemp("instructions") / "instructions.so")


def word(value: Number) -> int:
    """Return the bits of a float32, or of an integer."""
    return struct.unpack("<I", struct.pack("<f", value))[0] if isinstance(value, float) else value % 2**64


@pytest.mark.parametrize("code", CASES)
def test_an_instruction(instructions: Emulated, code: str) -> None:
    """On the values at which the PTX ISA has rules of its own. High bits that a source does not have do not matter."""
    result, rows = CASES[code]
    words = np.random.default_rng(1).integers(0, 2**32, (len(rows), 4), np.uint64) << np.uint64(32)
    for given, row in zip(words, rows, strict=True):
        is_wide = "%rd" in code
        given[: len(row) - 1] = [word(each) | (0 if is_wide else int(given[0])) for each in row[:-1]]
    instructions.launch(f"case_{list(CASES).index(code)}", (1, 1, 1), (len(rows), 1, 1), [words])
    for given, row in zip(words.tolist(), rows, strict=True):
        is_nan = isinstance(row[-1], float) and math.isnan(row[-1])
        assert (is_nan and given[3] & 0x7FFFFFFF > 0x7F800000) or given[3] == word(row[-1]) % 2 ** _BITS[result], row
