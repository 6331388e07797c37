"""From kernels to `host.so`: TVM compiles them to one object, and gcc links that with native/host.c."""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import tvm
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features, llvm_is_valid_cpu

from picompile_codegen.errors import BuildError, CodegenError
from picompile_codegen.isa import DEFAULT_ISA, ISAS, Isa
from picompile_codegen.kernels import Kernel
from picompile_codegen.pipeline import PIPELINE
from picompile_codegen.toolchain import c_compiler

_HOST_SOURCE = Path(__file__).parent / "native" / "host.c"
_READ_SOURCE = _HOST_SOURCE.with_name("read.c")
_GCC_FLAGS = (
    "-shared", "-fPIC", "-std=c11", "-O2", "-fvisibility=hidden",
    # Calls between the library's own functions are not to be intercepted by another library's of the same name.
    "-Wl,-Bsymbolic",
    # The same input gives the same bytes: no identifier, and no symbol table with names of temporary files.
    "-Wl,--build-id=none", "-s",
)  # fmt: skip
_LIBRARIES = ("-lpthread", "-lm")


def build_host_library(kernels: Iterable[Kernel], output: Path, isa: Isa = ISAS[DEFAULT_ISA]) -> None:
    """Compiles `kernels`, written for `isa`, and writes the shared library to `output`, which may exist already.

    Kernels of the same name are taken to be the same. Raises `BuildError` with the compiler's message, and
    `ToolchainError` where there is no C compiler for machines of `isa`.
    """
    compiler, target = c_compiler(isa), llvm_target(isa)
    functions = {kernel.name: _written_for(isa, kernel) for kernel in kernels}
    with tempfile.TemporaryDirectory(prefix="picompile-build-") as folder:
        object_file = Path(folder) / "kernels.o"
        _compile(functions, target, object_file)
        _link(compiler, object_file, output)


def llvm_target(isa: Isa) -> Target:
    """TVM's target for `isa`.

    Raises `BuildError` if this LLVM does not know it: TVM would merely log that, and compile for a generic machine.
    """
    target = Target(isa.llvm)
    known = llvm_is_valid_cpu(isa.mcpu, isa.triple)
    lacking = {name.removeprefix("+") for name in isa.mattr} - set(map(str, llvm_get_cpu_features(target)))
    if not known or lacking:
        what = ", ".join(sorted(lacking)) if known else isa.mcpu
        raise BuildError(f"this TVM's LLVM cannot compile for {isa.name}: it does not know {what}")
    return target


def _written_for(isa: Isa, kernel: Kernel) -> object:
    # LLVM ends the process over an instruction that the target lacks.
    if kernel.isa != isa.name:
        raise CodegenError(f"kernel {kernel.name} was written for {kernel.isa}, not for {isa.name}")
    return kernel.prim_func


def _compile(functions: dict[str, object], target: Target, object_file: Path) -> None:
    module = tvm.IRModule({name: functions[name] for name in sorted(functions)})
    try:
        executable = tvm.compile(module, target=target, tir_pipeline=PIPELINE)
        executable.mod.write_to_file(str(object_file), "o")
    except Exception as error:  # TVM raises many types, none of them its own
        raise BuildError(f"TVM cannot compile the kernels: {error}") from error


def _link(compiler: str, object_file: Path, output: Path) -> None:
    sources = [str(path) for path in (_HOST_SOURCE, _READ_SOURCE, object_file)]
    command = [compiler, *_GCC_FLAGS, "-o", str(output), *sources, *_LIBRARIES]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{compiler} cannot link the kernels: {result.stderr.strip()}")
