"""The C compilers that link an artifact's code: this machine's own, and those for other machines."""

import platform
import shutil
from collections.abc import Iterable

from picompile_codegen.errors import ToolchainError
from picompile_codegen.isa import Isa

# A machine by `uname -m` → what Debian and Ubuntu call the package of its cross compiler.
_CROSS_PACKAGES = {"x86_64": "gcc-x86-64-linux-gnu", "aarch64": "gcc-aarch64-linux-gnu"}


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
