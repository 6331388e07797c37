"""From kernels to a shared library: the same bytes for the same input, nothing needed but libc, vector code, errors."""

import re
import subprocess
from pathlib import Path

import pytest

from helpers.kernels.emulated import require
from picompile_codegen import cpu
from picompile_codegen.build import host_library as build
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import DEFAULT_ISA, ISAS, targeting
from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.errors import BuildError, CodegenError, ToolchainError
from picompile_codegen.specs import AddSpec, LinearSpec, symbol


def some_kernels() -> list[Kernel]:
    """Kernels with and without parallel regions, and with local tensors of every size."""
    return [
        cpu.write_kernel(LinearSpec(format="f16", n=64, k=1024, rows=1, bias=False)),
        cpu.write_kernel(LinearSpec(format="q4", n=64, k=4096, rows=1, bias=True)),
        cpu.write_kernel(LinearSpec(format="q8", n=64, k=1024, rows=8, bias=False)),
        cpu.write_kernel(AddSpec(dim=64, rows=1)),
    ]


def output_of(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "host.so"
    build_host_library(some_kernels(), path)
    return path


@pytest.mark.slow("compiles the same kernels twice")
def test_same_kernels_give_the_same_bytes(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order they come, from whatever folder, and if one comes twice."""
    monkeypatch.setenv("PICOMPILE_CACHE", "off")
    again = tmp_path / "other-name.so"
    build_host_library([*reversed(some_kernels()), some_kernels()[0]], again)
    assert again.read_bytes() == library.read_bytes()
    require("aarch64-linux-gnu-gcc")
    arm, files = ISAS["aarch64-dotprod"], [tmp_path / "a.so", tmp_path / "b.so"]
    for file in files:
        with targeting(arm):
            build_host_library([cpu.write_kernel(AddSpec(dim=8, rows=1))], file, arm)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_library_exports_kernels_and_needs_nothing_but_libc(library: Path) -> None:
    exported = set(output_of("nm", "-D", "--defined-only", "--format=just-symbols", library).split())
    assert {f"__tvm_ffi_{kernel.name}" for kernel in some_kernels()} <= exported
    assert {"pi_run", "pi_last_error"} <= exported
    needed = re.findall(r"NEEDED\s+(\S+)", output_of("objdump", "-p", library))
    assert set(needed) <= {"libc.so.6", "libm.so.6", "libpthread.so.0"}
    assert "TVM" not in output_of("nm", "-D", "--undefined-only", library)
    # TVM's heap: a kernel that asked for it would call a null pointer.
    assert "Workspace" not in output_of("nm", "-D", library)


def test_products_use_vector_instructions(library: Path) -> None:
    """LLVM can turn a vector of float16 into calls of a conversion function, one lane at a time."""
    code = output_of("objdump", "-d", "--no-show-raw-insn", library)
    assert re.search(r"vcvtph2ps .*%ymm", code)
    assert re.search(r"vfmadd\d+ps .*%ymm", code)
    assert not re.search(r"call\s+[0-9a-f]+ <__extendhfsf2", code)


def test_a_failing_linker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "host.c"
    source.write_text("#error not a host\n")
    monkeypatch.setattr(build, "_SOURCES", (source,))
    with pytest.raises(BuildError, match="not a host") as caught:
        build_host_library([cpu.write_kernel(AddSpec(dim=8, rows=1))], tmp_path / "host.so")
    assert caught.value.exit_code == 1
    source.write_text("int nowhere(void); int pi_nowhere(void) { return nowhere(); }")
    with pytest.raises(BuildError, match=r"undefined reference to .nowhere"):
        build_host_library([], tmp_path / "host.so")


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    cases = (DEFAULT_ISA, BuildError, "gcc"), ("aarch64-dotprod", ToolchainError, "apt install gcc-aarch64-linux-gnu")
    for isa, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            build_host_library([], tmp_path / "host.so", ISAS[isa])
    assert caught.value.exit_code == 6


def test_too_many_elements_are_refused() -> None:
    function = KernelFunction("large")
    with pytest.raises(CodegenError, match="elements"), function:
        function.floats("x", 2**16, 2**15)


def test_symbols_are_identifiers() -> None:
    assert symbol("norm", 64, 1e-05) == "norm_64_1em05"
    assert symbol("ffn", "fatrelu(-0.25)") == "ffn_fatrelum0p25"
    assert symbol("linear", "f16", "64x32", "r1", "") == "linear_f16_64x32_r1"
