"""From kernels to `host.so`: TVM compiles each to an object, and gcc links them with what is in native/."""

import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import tvm
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features, llvm_is_valid_cpu, llvm_version_major

import picompile_codegen.pipeline
from picompile_codegen.errors import BuildError, CodegenError
from picompile_codegen.interfaces import interfaces_source
from picompile_codegen.isa import DEFAULT_ISA, ISAS, Isa
from picompile_codegen.kernels import Kernel
from picompile_codegen.object_cache import cached_object, object_key
from picompile_codegen.pipeline import PIPELINE
from picompile_codegen.toolchain import c_compiler

_NATIVE = Path(__file__).parent / "native"
_SOURCES = (_NATIVE / "host.c", _NATIVE / "read.c")
_HEADER = _NATIVE / "abi.h"
_COMPILE_FLAGS = ("-c", "-fPIC", "-std=c11", "-O2", "-fvisibility=hidden")
_LINK_FLAGS = (
    "-shared",
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
        objects = []
        for number, source in enumerate(_SOURCES):
            objects.append(Path(folder) / f"source{number}.o")
            _compile_source(compiler, source, objects[-1])
        objects.append(Path(folder) / "interfaces.o")
        _compile_interfaces(compiler, functions.values(), objects[-1])
        for number, name in enumerate(sorted(functions)):
            objects.append(Path(folder) / f"{number}.o")
            _compile(functions[name], isa, target, objects[-1])
        _run(compiler, *_LINK_FLAGS, "-o", output, *objects, *_LIBRARIES)


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


def _written_for(isa: Isa, kernel: Kernel) -> Kernel:
    # LLVM ends the process over an instruction that the target lacks.
    if kernel.isa != isa.name:
        raise CodegenError(f"kernel {kernel.name} was written for {kernel.isa}, not for {isa.name}")
    return kernel


def _compile(kernel: Kernel, isa: Isa, target: Target, output: Path) -> None:
    def compile_to(path: Path) -> None:
        try:
            module = tvm.IRModule({kernel.name: kernel.prim_func})
            tvm.compile(module, target=target, tir_pipeline=PIPELINE).mod.write_to_file(str(path), "o")
        except Exception as error:  # TVM raises many types, none of them its own
            raise BuildError(f"TVM cannot compile the kernel {kernel.name}: {error}") from error

    cached_object(object_key(kernel.digest, repr(isa), *_compiler()), output, compile_to)


@cache
def _compiler() -> tuple[str, ...]:
    """What compiles kernels: versions, and our own part of it."""
    pipeline = Path(picompile_codegen.pipeline.__file__).read_text(encoding="utf-8")
    return version("apache-tvm"), str(llvm_version_major()), pipeline


def _compile_source(compiler: str, source: Path, output: Path) -> None:
    """What an artifact holds beside the kernels."""
    texts = (path.read_text(encoding="utf-8") for path in (source, _HEADER))
    key = object_key(*texts, *_COMPILE_FLAGS, compiler, _version_of(compiler))
    cached_object(key, output, lambda path: _run(compiler, *_COMPILE_FLAGS, "-o", path, source))


def _compile_interfaces(compiler: str, kernels: Iterable[Kernel], output: Path) -> None:
    """What the library says of its kernels."""
    source = output.with_suffix(".c")
    source.write_text(interfaces_source(kernels), encoding="utf-8")
    _run(compiler, *_COMPILE_FLAGS, "-o", output, source)


@cache
def _version_of(compiler: str) -> str:
    return _run(compiler, "--version")


def _run(compiler: str, *arguments: str | Path) -> str:
    result = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{compiler} cannot build the kernels' library: {result.stderr.strip()}")
    return result.stdout
