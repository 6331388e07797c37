"""The PTX translator: memory, guards, warps, and what it does not know, which is an error."""

import numpy as np
import pytest

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError
from helpers.ptx.errors import PtxError
from helpers.ptx.syntax import parse
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
    "widened": "ld.global.nc.s8 %r4, [%rd1];\nld.global.u8 %rs4, [%rd1+1];\ncvt.u32.u16 %r5, %rs4;\n"
    "st.global.v2.u32 [%rd2], {%r4, %r5};\nst.global.u8 [%rd2+8], %r4;",
    # Each thread reads what the next one wrote.
    "exchanged": ".shared .align 16 .b8 rows[1024];\nmov.u64 %rd4, rows;\nadd.s64 %rd4, %rd4, %rd3;\n"
    "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd1];\nst.shared.v4.u32 [%rd4], {%r4, %r5, %r6, %r7};\nbar.sync 0;\n"
    "add.s32 %r1, %r0, 1;\nand.b32 %r1, %r1, 63;\nshl.b32 %r1, %r1, 4;\nmov.u32 %r2, rows;\nadd.s32 %r2, %r2, %r1;\n"
    "ld.shared.v2.u32 {%r8, %r9}, [%r2];\nld.shared.u32 %r10, [%r2+8];\nst.global.v2.u32 [%rd2], {%r8, %r9};\n"
    "st.global.u32 [%rd2+8], %r10;",
    "beyond": ".shared .align 16 .b8 rows[1008];\nmov.u64 %rd4, rows;\nadd.s64 %rd4, %rd4, %rd3;\n"
    "st.shared.u32 [%rd4], %r0;",
    "raced": ".shared .align 4 .b8 one[4];\nst.shared.u32 [one], %r0;",
    "misaligned": "ld.global.v2.u32 {%r4, %r5}, [%rd1+4];\nst.global.v2.u32 [%rd2], {%r4, %r5};",
    "counted": "ld.param.u64 %rd4, [counted_param_1];\natom.global.add.u64 %rd5, [%rd4], 3;\n"
    "red.global.add.u64 [%rd4], 4;\natom.global.inc.u32 %r4, [%rd4+8], 62;",
    # In segments of eight lanes: the exchange with lane own ^ 3, and with a lane of another segment.
    "shuffled": "mov.u32 %r1, 6175;\nmov.u32 %r2, -1;\nshfl.sync.bfly.b32 %r4|%p1, %r0, 3, %r1, %r2;\n"
    "shfl.sync.bfly.b32 %r5|%p2, %r0, 24, %r1, %r2;\nselp.u32 %r6, 1, 0, %p1;\nselp.u32 %r7, 1, 0, %p2;\n"
    "st.global.v4.u32 [%rd2], {%r4, %r5, %r6, %r7};",
    "clamped": "shfl.sync.bfly.b32 %r4, %r0, 1, 15, -1;\nst.global.u32 [%rd2], %r4;",
    "voted": "setp.gt.u32 %p1, %r0, 40;\nvote.sync.ballot.b32 %r4, %p1, -1;\nst.global.u32 [%rd2], %r4;",
    "looped": "mov.u32 %r4, 0;\n$L_1:\n.pragma \"nounroll\";\nadd.s32 %r4, %r4, 2;\nsetp.lt.u32 %p1, %r4, %r0;\n"
    "@!%p1 bra $L_2;\nbra.uni $L_1;\n$L_2:\nst.global.u32 [%rd2], %r4;",
    "unset": "st.global.u32 [%rd2], %r8;",
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


def ran(kernels: Emulated, name: str, order: int = 0, first: int = 0xAAAAAAAA) -> tuple[np.ndarray, np.ndarray]:
    """The words that each thread read, and those that it wrote: four each."""
    source = np.random.default_rng(1).integers(0, 2**32, (64, 4), np.uint32)
    out = np.full((64, 4), first, np.uint32)
    kernels.launch(name, (1, 1, 1), (64, 1, 1), [source, out], order)
    return source, out


@pytest.mark.parametrize("order", ORDERS)
def test_memory(kernels: Emulated, order: int) -> None:
    source, out = ran(kernels, "guarded", order)
    expected = np.where(IDS[:, None] % 2 == 0, source[:, ::-1], 0xFFFFFFFF)
    np.testing.assert_array_equal(out, expected)
    source, out = ran(kernels, "widened", order)
    read = source.view(np.uint8)
    np.testing.assert_array_equal(out[:, 0].view(np.int32), read[:, 0].view(np.int8))
    np.testing.assert_array_equal(out[:, 1], read[:, 1])
    np.testing.assert_array_equal(out[:, 2], 0xAAAAAA00 | read[:, 0].astype(np.uint32))
    source, out = ran(kernels, "exchanged", order)
    np.testing.assert_array_equal(out[:, :3], np.roll(source, -1, axis=0)[:, :3])


@pytest.mark.parametrize("order", ORDERS)
def test_warps_and_branches(kernels: Emulated, order: int) -> None:
    _, out = ran(kernels, "shuffled", order)
    # A lane of a later segment has no value for this one, so that the own one stays; an earlier one has.
    outside = np.where(IDS % 32 ^ 24 <= IDS % 32 | 7, IDS ^ 24, IDS)
    expected = np.stack([IDS ^ 3, outside, np.ones_like(IDS), (IDS % 32 ^ 24) <= (IDS % 32 | 7)], axis=1)
    np.testing.assert_array_equal(out, expected)
    _, out = ran(kernels, "voted", order)
    np.testing.assert_array_equal(out[:, 0], np.where(IDS < 32, 0, 0xFFFFFE00))
    _, out = ran(kernels, "looped", order)
    np.testing.assert_array_equal(out[:, 0], np.maximum(2, (IDS + 1) // 2 * 2))
    _, out = ran(kernels, "counted", order, first=0)
    assert out.reshape(-1)[:4].tolist() == [7 * 64, 0, 1, 0], "the counter is 0 again after 63"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beyond", "outside of all arguments"),
        ("raced", "writes shared memory"),
        ("misaligned", "aligned to 8 bytes"),
        ("clamped", "no power of two"),
    ],
)
def test_faults_are_found(kernels: Emulated, name: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        ran(kernels, name)


def test_a_register_that_nothing_sets_is_no_zero(kernels: Emulated) -> None:
    _, out = ran(kernels, "unset")
    assert set(out[:, 0].tolist()) == {0xFEFEFEFE}


UNKNOWN = {
    "ld.acquire.gpu.global.u32 %r1, [%rd1];": "no rule",
    "ld.global.L1::evict_last.u32 %r1, [%rd1];": "no rule",
    "ld.u32 %r1, [%rd1];": "no rule",
    "ld.volatile.global.v2.u32 {%r1, %r2}, [%rd1];": "no rule",
    "ld.global.v4.u32 {%r1, %r2}, [%rd1];": "2 values",
    "ld.global.u32 %r1, [%r2];": "no address",
    "ld.global.u64 %r1, [%rd1];": "not as wide as .u64",
    "ld.shared.u32 %r1, [nowhere];": "nowhere is not known",
    "max.NaN.f32 %f1, %f2, %f3;": "no rule",
    "add.ftz.f32 %f1, %f2, %f3;": "no rule",
    "add.s32 %r1, %r2, %rs3;": "not as wide as .u32",
    "add.s32 %r1, %r2, %r16;": "no register",
    "add.s32 %r1, %r2, 4294967296;": "no .u32",
    "add.f32 %f1, %f2, 1;": "no .f32",
    "mov.u32 %r1, %clock;": "no register",
    "setp.lt.s32 %p1|%p2, %r1, %r2;": "no register",
    "setp.lt.and.s32 %p1, %r1, %r2, %p2;": "no rule",
    "vote.sync.ballot.b32 %r1, !%p1, -1;": "not known",
    "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;": "no rule",
    "bar.sync 1;": "barrier 0",
    "bar.sync 0, 32;": "barrier 0",
    "atom.global.cas.b32 %r1, [%rd1], 0, 1;": "no rule",
    "atom.global.sys.add.u32 %r1, [%rd1], 1;": "no rule",
    "cp.async.cg.shared.global [%r1], [%rd1], 8;": "no rule|16 bytes",
    "fence.sc.sys;": "no rule",
    "call.uni (%r1), function;": "no rule",
    ".local .align 8 .b8 depot[16];": "not known",
    ".pragma \"other\";": "not known",
    ".reg .f64 %fd<3>;\nadd.f64 %fd1, %fd1, %fd1;": "no rule",
}  # fmt: skip


@pytest.mark.parametrize("body", UNKNOWN)
def test_what_is_not_known_is_an_error(body: str) -> None:
    with pytest.raises(PtxError, match=UNKNOWN[body]):
        source_of(parse(module("unknown", body)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".global .align 4 .b8 table[16];", "no kernel"),
        (".extern .shared .align 16 .b8 rows[];", "no kernel"),
        (".visible .entry f(.param .u32 f_param_0)\n{\nret;\n}", "pointers alone"),
        (".visible .entry f()\n.reqntid 64, 1, 1\n{\nret;\n}", "not known"),
        (".visible .entry f()\n{\nret;\n", "no statement"),
    ],
)
def test_a_module_with_anything_else_is_an_error(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        parse(f".version 8.7\n.target sm_90\n.address_size 64\n{text}")


def test_an_error_has_the_line() -> None:
    text = module("unknown", "add.s32 %r1, %r2, %r3;\nsin.approx.f32 %f1, %f2;")
    line = text.split("\n").index("sin.approx.f32 %f1, %f2;") + 1
    with pytest.raises(PtxError, match=f"^line {line}: sin.approx.f32 %f1, %f2: "):
        source_of(parse(text))
