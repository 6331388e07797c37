"""The host library of an artifact: a C compiler links the kernels' objects with native/."""

import errno
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event

from picompile_codegen.build.interfaces import interfaces_source
from picompile_codegen.build.isa import DEFAULT_ISA, ISAS, Isa
from picompile_codegen.build.kernel_objects import kernel_object, llvm_target
from picompile_codegen.build.object_cache import cached_object, object_key, temporary_folder
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.errors import BuildError, CodegenError, ToolchainError

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


def build_host_library(
    kernels: Iterable[Kernel],
    output: Path,
    isa: Isa = ISAS[DEFAULT_ISA],
    stop: Event | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Compile `kernels`, written for `isa`, and write the shared library to `output`, which may exist already.

    Kernels of the same name are taken to be the same. `advance` receives 1 for each that is compiled. Once `stop` is
    set, no further kernel is begun. Raises `BuildError` with the compiler's message or where it was stopped, and
    `ToolchainError` where there is no C compiler for machines of `isa`.
    """
    compiler = c_compiler(isa)
    functions = {kernel.name: _written_for(isa, kernel) for kernel in kernels}
    with temporary_folder() as folder:
        found = {f"{source.stem}.c.o": _compiled_source(compiler, source, folder) for source in _SOURCES}
        found["interfaces.o"] = _compiled_interfaces(compiler, functions.values(), folder)
        objects = _compile_all([functions[name] for name in sorted(functions)], isa, stop or Event(), advance)
        found |= {f"{number}.o": content for number, content in enumerate(objects)}
        for name, content in found.items():
            _write(folder / name, content)
        linked = folder / "linked.so"
        run_compiler(compiler, *_LINK_FLAGS, "-o", linked, *map(folder.joinpath, found), *_LIBRARIES, folder=folder)
        output.write_bytes(linked.read_bytes())


def _written_for(isa: Isa, kernel: Kernel) -> Kernel:
    # LLVM ends the process over an instruction that the target lacks.
    if kernel.isa != isa.name:
        raise CodegenError(f"kernel {kernel.name} was written for {kernel.isa}, not for {isa.name}")
    return kernel


def _compile_all(kernels: Sequence[Kernel], isa: Isa, stop: Event, advance: Callable[[int], None]) -> list[bytes]:
    """Return each kernel's object. TVM and LLVM, which compile without Python's lock, do several side by side."""
    target = llvm_target(isa)

    def compile_one(kernel: Kernel) -> bytes:
        if stop.is_set():
            raise BuildError("stopped before all kernels were compiled")
        made = kernel_object(kernel, isa, target)
        advance(1)
        return made

    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        waiting = [pool.submit(compile_one, kernel) for kernel in kernels]
        try:
            return [each.result() for each in waiting]
        except BaseException:
            # A compilation that has begun cannot be stopped; the others need not begin.
            for each in waiting:
                each.cancel()
            raise


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        # What fails while it writes does not say where.
        raise OSError(error.errno, error.strerror, str(path.parent)) from error


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
