"""The host library of an artifact: TVM compiles each kernel to an object, and a C compiler links them with native/."""

import errno
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features, llvm_is_valid_cpu, llvm_version_major
from tvm.tirx import transform
from tvm.tirx.compilation_pipeline import finalize_device_passes, finalize_host_passes, register_tir_pipeline

from picompile_codegen.build.interfaces import interfaces_source
from picompile_codegen.build.isa import DEFAULT_ISA, ISAS, Isa
from picompile_codegen.build.object_cache import cached_object, object_key, temporary_folder
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.errors import BuildError, CodegenError, ToolchainError

# TVM's pipeline `tirx` lowers kernels to LLVM's input here, without the passes that kernels do not need.
#
# `tirx` leaves local tensors on the stack, as cpu/tensor.py asks. TVM's default pipeline allocates larger ones by TVM's
# runtime, which an artifact does not have. The passes that are left out take a third of the time or more:
#
# - the first of two simplifications: the code is the same, byte by byte;
# - the elimination of common subexpressions, which LLVM does by itself; for large kernels it takes most of the time;
# - the passes for GPUs, bfloat16, 8-bit floats, 64-bit indices, and loops marked to be unrolled or vectorized.


PIPELINE = "picompile"


def _lower(module: Any, _: Any) -> Any:
    passes = [
        transform.LowerTIRx(),
        transform.LowerTIRxOpaque(),
        transform.FlattenBuffer(),
        transform.StmtSimplify(),
        transform.AnnotateEntryFunc(),
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
    ]
    return tvm.transform.Sequential(passes)(module)


def _pipeline() -> tuple[Any, Any, Any]:
    return tvm.transform.module_pass(_lower, opt_level=0), finalize_host_passes, finalize_device_passes


# TVM takes pipelines by name only.
register_tir_pipeline(PIPELINE, _pipeline)


# The package of a cross compiler in Debian and Ubuntu, by the machine that `uname -m` names.
_CROSS_PACKAGES = {"x86_64": "gcc-x86-64-linux-gnu", "aarch64": "gcc-aarch64-linux-gnu"}

# Messages by which a compiler, or the system for it, reports a full disk, quota or limit on files.
_FULL = {
    errno.ENOSPC: (os.strerror(errno.ENOSPC),),
    errno.EDQUOT: (os.strerror(errno.EDQUOT),),
    errno.EFBIG: (os.strerror(errno.EFBIG), "File size limit exceeded"),
}


def c_compiler(isa: Isa) -> str:
    """Return the compiler for machines of `isa`: gcc here, a cross compiler elsewhere. Raises `ToolchainError`."""
    own = isa.machine == platform.machine()
    name = "gcc" if own else f"{isa.machine}-linux-gnu-gcc"
    if shutil.which(name) is None:
        package = "gcc libc6-dev" if own else _CROSS_PACKAGES.get(isa.machine, name)
        instead = "" if own else "; or compile for this machine's processor, --target native"
        raise ToolchainError(
            f"{name} links the code for {isa.machine}, and was not found; install it (Debian, Ubuntu: apt install "
            f"{package}){instead}"
        )
    return name


def require_c_compilers(isas: Iterable[Isa]) -> None:
    """Raise `ToolchainError` unless code for all of `isas` can be linked here."""
    for isa in isas:
        c_compiler(isa)


def run_compiler(compiler: str, *arguments: str | Path, folder: Path | None = None) -> str:
    """Run `compiler`, whose temporary files go to `folder`, and return its output.

    Whatever ends this process with an exception ends the compiler, and the processes that it started, too. Raises
    `BuildError` with its message, and `OSError` where the disk of `folder` is full.
    """
    # The messages are searched for the texts of _FULL, which are English.
    environment = {**os.environ, "LC_ALL": "C"}
    if folder is not None:
        environment["TMPDIR"] = str(folder)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [compiler, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, message = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        return output
    for number, texts in _FULL.items():
        if any(text in message for text in texts):
            raise OSError(number, os.strerror(number), str(folder))
    raise BuildError(f"{compiler} cannot build the kernels' library: {message.strip()}")


_NATIVE = Path(__file__).parent / "native"
_SOURCES = (_NATIVE / "host.c", _NATIVE / "read.c")
_HEADER = _NATIVE / "abi.h"
_COMPILE_FLAGS = ("-c", "-fPIC", "-std=c11", "-O2", "-fvisibility=hidden")
_LINK_FLAGS = (
    "-shared",
    # Calls between the library's own functions are not to be intercepted by another library's of the same name.
    "-Wl,-Bsymbolic",
    # What is missing is an error here, and not where the artifact is loaded.
    "-Wl,-z,defs",
    # No identifier, and no symbol table with names of temporary files: equal inputs give equal bytes.
    "-Wl,--build-id=none", "-s",
)  # fmt: skip
_LIBRARIES = ("-lpthread", "-lm")
# Kernels that are compiled at a time, so that memory is bounded where there are many cores.
_MOST_THREADS = 8


def build_host_library(kernels: Iterable[Kernel], output: Path, isa: Isa = ISAS[DEFAULT_ISA]) -> None:
    """Compile `kernels`, written for `isa`, and write the shared library to `output`, which may exist already.

    Kernels of the same name are taken to be the same. Raises `BuildError` with the compiler's message, and
    `ToolchainError` where there is no C compiler for machines of `isa`.
    """
    compiler, target = c_compiler(isa), llvm_target(isa)
    functions = {kernel.name: _written_for(isa, kernel) for kernel in kernels}
    with temporary_folder() as folder:
        found = {f"{source.stem}.c.o": _compiled_source(compiler, source, folder) for source in _SOURCES}
        found["interfaces.o"] = _compiled_interfaces(compiler, functions.values(), folder)
        objects = _compile_all([functions[name] for name in sorted(functions)], isa, target)
        found |= {f"{number}.o": content for number, content in enumerate(objects)}
        for name, content in found.items():
            _write(folder / name, content)
        linked = folder / "linked.so"
        run_compiler(compiler, *_LINK_FLAGS, "-o", linked, *map(folder.joinpath, found), *_LIBRARIES, folder=folder)
        output.write_bytes(linked.read_bytes())


def llvm_target(isa: Isa) -> Target:
    """Return TVM's target for `isa`.

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


def _compile_all(kernels: Sequence[Kernel], isa: Isa, target: Target) -> list[bytes]:
    """Return each kernel's object. TVM and LLVM, which compile without Python's lock, do several side by side."""
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        waiting = [pool.submit(_compiled, kernel, isa, target) for kernel in kernels]
        try:
            return [each.result() for each in waiting]
        except BaseException:
            # A compilation that has begun cannot be stopped; the others need not begin.
            for each in waiting:
                each.cancel()
            raise


def _compiled(kernel: Kernel, isa: Isa, target: Target) -> bytes:
    def compile_kernel() -> bytes:
        try:
            module = tvm.IRModule({kernel.name: kernel.prim_func})
            return _object_of(tvm.compile(module, target=target, tir_pipeline=PIPELINE).mod)
        except Exception as error:  # TVM raises many types, none of them its own
            raise BuildError(f"TVM cannot compile the kernel {kernel.name}: {error}") from error

    return cached_object(object_key(kernel.digest, repr(isa.llvm), *_compiler()), compile_kernel)


def _object_of(module: Any) -> bytes:
    """Return the object file of a compiled module. It is made in memory: LLVM ends the process where a disk is full."""
    handle = os.memfd_create("object")
    try:
        module.write_to_file(f"/proc/self/fd/{handle}", "o")
        return os.pread(handle, os.fstat(handle).st_size, 0)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        # What fails while it writes does not say where.
        raise OSError(error.errno, error.strerror, str(path.parent)) from error


@cache
def _compiler() -> tuple[str, ...]:
    """Return what identifies the compiler of kernels: the versions of TVM and LLVM, and the text of this file."""
    pipeline = Path(__file__).read_text(encoding="utf-8")
    return version("apache-tvm"), str(llvm_version_major()), pipeline


def _compiled_source(compiler: str, source: Path, folder: Path) -> bytes:
    """Return the object of `source`, which an artifact holds beside the kernels; `folder` is for temporary files."""

    def compile_source() -> bytes:
        path = folder / f"{source.stem}.made.o"
        run_compiler(compiler, *_COMPILE_FLAGS, "-o", path, source, folder=folder)
        return path.read_bytes()

    texts = (path.read_text(encoding="utf-8") for path in (source, _HEADER))
    key = object_key(*texts, *_COMPILE_FLAGS, compiler, _version_of(compiler))
    return cached_object(key, compile_source)


def _compiled_interfaces(compiler: str, kernels: Iterable[Kernel], folder: Path) -> bytes:
    """Return the object with the interfaces of the library's kernels; `folder` is for temporary files."""
    source, path = folder / "interfaces.c", folder / "interfaces.made.o"
    _write(source, interfaces_source(kernels).encode())
    run_compiler(compiler, *_COMPILE_FLAGS, "-o", path, source, folder=folder)
    return path.read_bytes()


@cache
def _version_of(compiler: str) -> str:
    return run_compiler(compiler, "--version")
