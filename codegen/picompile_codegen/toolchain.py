"""The C compilers that link an artifact's code: this machine's own, and those for other machines."""

import errno
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from picompile_codegen.errors import BuildError, ToolchainError
from picompile_codegen.isa import Isa

# A machine by `uname -m` → what Debian and Ubuntu call the package of its cross compiler.
_CROSS_PACKAGES = {"x86_64": "gcc-x86-64-linux-gnu", "aarch64": "gcc-aarch64-linux-gnu"}

# What a compiler, or the system for it, says of a disk, a quota or a limit on files that is exhausted.
_FULL = {
    errno.ENOSPC: (os.strerror(errno.ENOSPC),),
    errno.EDQUOT: (os.strerror(errno.EDQUOT),),
    errno.EFBIG: (os.strerror(errno.EFBIG), "File size limit exceeded"),
}


def c_compiler(isa: Isa) -> str:
    """The compiler for machines of `isa`: gcc here, a cross compiler elsewhere. Raises `ToolchainError`."""
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
    """Raises `ToolchainError` unless code for all of `isas` can be linked here."""
    for isa in isas:
        c_compiler(isa)


def run_compiler(compiler: str, *arguments: str | Path, folder: Path | None = None) -> str:
    """Runs `compiler`, whose temporary files go to `folder`, and returns what it printed.

    Whatever ends this process with an exception ends the compiler, and the processes that it started, too. Raises
    `BuildError` with its message, and `OSError` where the disk of `folder` is full.
    """
    # Its messages are looked into.
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
