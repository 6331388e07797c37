"""The machine code of an artifact: for which instruction sets it is made, in which files, its entries in the manifest.

The kernels of all instruction sets have the same names and arguments, so that one program runs with any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.progress import Progress
from picompile.targets import find_compiled_targets, native_target

if TYPE_CHECKING:
    from picompile_codegen.isa import Isa
    from picompile_codegen.lower import Lowered


@dataclass(frozen=True)
class Code:
    """The code for one instruction set, and its file in the artifact."""

    isa: "Isa"
    file: str

    def to_json(self) -> dict[str, Any]:
        """The entry of the manifest: all that the runtime needs for its choice."""
        isa = self.isa
        return {"isa": isa.name, "machine": isa.machine, "features": list(isa.features), "file": self.file}


def planned_code(targets: str) -> list[Code]:
    """The code that an artifact for `targets` has, best first.

    Raises `TargetError`, `MachineError` for `native` where nothing is native, and `ToolchainError` where this machine
    cannot link it.
    """
    from picompile_codegen.isa import ISAS
    from picompile_codegen.toolchain import require_c_compilers

    wanted = {isa for target in find_compiled_targets(targets) for isa in target.isas}
    # The table of instruction sets has the better of two of one machine behind the other.
    isas = [isa for isa in reversed(ISAS.values()) if isa.name in wanted]
    require_c_compilers(isas)
    if len(isas) == 1:
        return [Code(isas[0], "kernels/host.so")]
    return [_apart(isa) for isa in isas]


def runs_here(code: Sequence[Code]) -> bool:
    """Whether this machine can run any of it."""
    from picompile_runtime.machine import is_machine, missing_features

    return any(is_machine(each.isa.machine) and not missing_features(each.isa.features) for each in code)


def native_code(file: str) -> Code:
    """The best code for this machine, in `file`. Raises `MachineError` where none can be made for it."""
    from picompile_codegen.isa import ISAS

    return Code(ISAS[native_target().isas[0]], file)


def _apart(isa: "Isa") -> Code:
    return Code(isa, f"kernels/host.{isa.name}.so")


def build_code(code: Sequence[Code], lowered: "Lowered", folder: Path, progress: Progress) -> None:
    """Compiles the kernels of `lowered` into the artifact's `folder`. Raises `BuildError`."""
    from picompile_codegen.build import build_host_library

    (folder / "kernels").mkdir(exist_ok=True)
    with progress.step("kernels", len(code)) as advance:
        for each in code:
            build_host_library(lowered.kernels_for(each.isa), folder / each.file, each.isa)
            advance(1)
