"""Loads of what others write, in PTX and in machine code: right in our kernels, and found where they are not."""

import re
from pathlib import Path

import pytest

from helpers.ptx.device_code import DeviceCode, code_in_folder
from helpers.ptx.loads import loads_of, wrong_loads
from helpers.ptx.machine_code import function_faults, functions_of, machine_faults
from helpers.ptx.syntax import PtxError, PtxKernel, parse
from helpers.support import BuildOnce
from picompile_codegen import cuda
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.specs import LinearSpec, ReceiveSpec, SendSpec, TopLogitsSpec

SPECS = (
    ReceiveSpec(dim=100, rows=3, counted=True),
    SendSpec(dim=100, rows=3),
    LinearSpec(format="f16", n=40, k=64, rows=1, bias=False),
    TopLogitsSpec(vocab=5003, rows=1),
)
RECEIVE = "receive_100_r3_counted_kernel"


def _build(folder: Path) -> None:
    folder.mkdir()
    build_cuda([cuda.write_kernel(spec) for spec in SPECS], folder, 90)


@pytest.fixture(scope="module")
def code(build_once: BuildOnce) -> DeviceCode:
    return code_in_folder(build_once("ptx-loads", _build))


@pytest.fixture(scope="module")
def receive(code: DeviceCode) -> PtxKernel:
    return next(kernel for kernel in parse(code.ptx) if kernel.name == RECEIVE)


def test_loads_of_our_kernels_are_right(code: DeviceCode) -> None:
    assert code.wrong_loads(parse(code.ptx)) == []
    assert machine_faults(code, parse(code.ptx)) == []


def test_parameters_are_known_by_name(code: DeviceCode, receive: PtxKernel) -> None:
    role, kinds = code.roles()[RECEIVE], loads_of(receive).kinds
    found = {name: kinds[parameter] for name, parameter in zip(role.names, receive.parameters, strict=True)}
    assert found == {
        "abandoned": {"volatile ld", "volatile st"},
        "count": {"constant"},
        "flag": {"volatile ld"},
        "source": {"volatile ld"},
        "step": {"constant"},
        "y": {"store"},
    }
    assert role.from_host == {"source"}


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("ld.global.nc.f32", "source: ld.global.nc, but also volatile ld"),
        ("ld.global.f32", "source: plain loads, but also volatile ones"),
    ],
)
def test_one_load_of_what_the_host_writes_is_found(code: DeviceCode, load: str, message: str) -> None:
    planted = code.ptx.replace("ld.volatile.global.f32", load, 1)
    assert planted != code.ptx
    found = code.wrong_loads(parse(planted))
    assert f"{RECEIVE}: {message}" in found
    from_host = f"{RECEIVE}: source: the host writes it meanwhile, and not all loads are volatile"
    assert from_host in found
    # Where no volatile load is left, nothing else tells that somebody writes there.
    assert code.wrong_loads(parse(code.ptx.replace("ld.volatile.global.f32", load))) == [from_host]


def written_and_read(load: str, change: str) -> PtxKernel:
    """A kernel that reads a parameter by one of two addresses, each in a loop after its use, and changes it."""
    (kernel,) = parse(
        ".version 8.7\n.target sm_90\n.address_size 64\n"
        ".visible .entry f(.param .u64 f_param_0, .param .u64 f_param_1)\n"
        "{\n.reg .pred %p<2>;\n.reg .b32 %r<4>;\n.reg .b64 %rd<8>;\n"
        "ld.param.u64 %rd1, [f_param_0];\nld.param.u64 %rd2, [f_param_1];\nmov.u64 %rd4, %rd2;\n$L:\n"
        f"{load} %r1, [%rd4+8];\nsetp.eq.s32 %p1, %r1, 0;\nselp.b64 %rd3, %rd1, %rd2, %p1;\n"
        f"add.s64 %rd4, %rd3, 16;\n@%p1 bra $L;\n{change}\nret;\n}}"
    )
    return kernel


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("st.global.u32 [%rd1], %r1;", "store"),
        ("st.volatile.global.u32 [%rd1], %r1;", "volatile st"),
        ("atom.global.add.u32 %r2, [%rd1], %r1;", "atomic"),
        ("ld.volatile.global.u32 %r2, [%rd1];", "volatile ld"),
    ],
)
def test_a_parameter_that_changes_is_found(change: str, kind: str) -> None:
    assert wrong_loads(written_and_read("ld.global.nc.u32", change)) == [f"f: f_param_0: ld.global.nc, but also {kind}"]
    assert wrong_loads(written_and_read("ld.global.nc.u32", "")) == []
    plain = [] if kind != "volatile ld" else ["f: f_param_0: plain loads, but also volatile ones"]
    assert wrong_loads(written_and_read("ld.global.u32", change)) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("st.global.u32 [%rd7], %r1;", "no parameter leads to this address"),
        ("st.release.sys.global.u32 [%rd1], %r1;", "not known what this reads or writes"),
    ],
)
def test_an_access_that_is_not_known_is_an_error(change: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        loads_of(written_and_read("ld.global.nc.u32", change))


def test_faults_in_machine_code_are_found(code: DeviceCode, receive: PtxKernel) -> None:
    text, count = functions_of(code.cubin)[RECEIVE], loads_of(receive).volatile_loads
    assert function_faults(text, count) == []
    strong, last = "LDG.E.STRONG.SYS", text.rindex("LDG.E.STRONG.SYS")
    assert strong in text[: text.index("NANOSLEEP")]
    planted = {
        f"{count - 1} loads see other writers, but {count} are volatile": f"{text[:last]}LDG.E{text[last + 16 :]}",
        "a wait reads its flag by LDG.E": text.replace(strong, "LDG.E"),
        "no fence for the system": text.replace("CCTL.IVALL", "NOP"),
        "no fence for the system that": re.sub(r"MEMBAR\.ALL\.SYS", "MEMBAR.ALL.GPU", text),
        "local memory: 0 bytes, LDL, STL.64": text + "\n/*fff0*/ @P0 LDL R1, [R1] ;\n/*fff8*/ STL.64 [R1], R2 ;",
    }
    for message, changed in planted.items():
        assert changed != text
        assert message in "; ".join(function_faults(changed, count))
    assert function_faults(text, count, local_bytes=16) == ["local memory: 16 bytes"]
