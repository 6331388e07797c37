"""The machine code of an artifact: for which instruction sets it is made, in which files, its entries in the manifest.

The kernels of all instruction sets have the same names and arguments, so that one program runs with any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from picompile.machine import find_compiled_targets, gpu_of, native_target
from picompile.progress import Progress

if TYPE_CHECKING:
    from picompile.compile_options import CompileOptions
    from picompile.placement.plan import Plan
    from picompile_codegen.build.isa import Isa
    from picompile_codegen.lowering.lower import Lowered
    from picompile_codegen.lowering.placement import Placement


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
    from picompile_codegen.build.host_library import require_c_compilers
    from picompile_codegen.build.isa import ISAS

    wanted = {isa for target in find_compiled_targets(targets) for isa in target.isas}
    # The table of instruction sets has the better of two of one machine behind the other.
    isas = [isa for isa in reversed(ISAS.values()) if isa.name in wanted]
    require_c_compilers(isas)
    if len(isas) == 1:
        return [Code(isas[0], "kernels/host.so")]
    return [_apart(isa) for isa in isas]


def runs_here(code: Sequence[Code]) -> bool:
    """Whether this machine can run any of it."""
    from picompile_runtime.devices.machine import is_machine, missing_features

    return any(is_machine(each.isa.machine) and not missing_features(each.isa.features) for each in code)


def native_code(file: str) -> Code:
    """The best code for this machine, in `file`. Raises `MachineError` where none can be made for it."""
    from picompile_codegen.build.isa import ISAS

    return Code(ISAS[native_target().isas[0]], file)


def _apart(isa: "Isa") -> Code:
    return Code(isa, f"kernels/host.{isa.name}.so")


def build_code(code: Sequence[Code], lowered: "Lowered", folder: Path, progress: Progress) -> None:
    """Compiles the kernels of `lowered` into the artifact's `folder`. Raises `BuildError`."""
    from picompile_codegen.build.host_library import build_host_library

    (folder / "kernels").mkdir(exist_ok=True)
    with progress.step("kernels", len(code)) as advance:
        for each in code:
            build_host_library(lowered.kernels_for(each.isa), folder / each.file, each.isa)
            advance(1)


# What an artifact has for its hot device: which one, what of the model runs there, and its code.


@dataclass(frozen=True)
class AcceleratorTarget:
    """A hot device: a second partition of the CPU, or a GPU of compute capability `sm` / 10."""

    kind: Literal["cpu", "cuda"]
    sm: int = 0

    def build(self, code: "Sequence[Code]", lowered: "Lowered", folder: Path, progress: Progress) -> dict[str, Any]:
        """Compiles its kernels into the artifact's `folder`; the entry of the manifest. Raises `BuildError`."""
        if self.kind == "cpu":
            return _build_cpu(code, lowered, folder, progress)
        return _build_cuda(self.sm, lowered, folder, progress)


def accelerator_target(options: "CompileOptions") -> AcceleratorTarget | None:
    """The hot device that is compiled for, None where there is none.

    Raises `ToolchainError` where there is nothing to make its code with.
    """
    if options.device is None:
        return None
    gpu = gpu_of(options.target)
    if options.device == "cpu" or gpu is None or gpu.sm is None:
        return AcceleratorTarget("cpu")
    from picompile_codegen.cuda.build import require_nvrtc

    require_nvrtc()
    return AcceleratorTarget("cuda", gpu.sm)


def placement(plan: "Plan | None", layers: int) -> "Placement":
    """What of a model runs on the hot device beside hot neurons: what the plan says, or all that can."""
    from picompile_codegen.lowering.placement import Placement

    if plan is None:
        return Placement.all_of(layers)
    return Placement(
        attention=frozenset(each.layer for each in plan.layers if each.attention == "gpu"),
        caches=frozenset(each.layer for each in plan.layers if each.kv_cache == "gpu"),
        predictors=frozenset(each.layer for each in plan.layers if each.predictor == "gpu"),
        head=plan.head == "gpu",
    )


def _build_cpu(code: "Sequence[Code]", lowered: "Lowered", folder: Path, progress: Progress) -> dict[str, Any]:
    """For each instruction set that the host has code for: whichever is chosen, both sides have it."""
    from picompile_codegen.build.host_library import build_host_library

    variants = [replace(each, file=f"kernels/hot.{each.isa.name}.so") for each in code]
    with progress.step("hot device", len(variants)) as advance:
        for each in variants:
            build_host_library(lowered.accelerator_kernels_for(each.isa), folder / each.file, each.isa)
            advance(1)
    return {"kind": "cpu", "code": [each.to_json() for each in variants]}


def _build_cuda(sm: int, lowered: "Lowered", folder: Path, progress: Progress) -> dict[str, Any]:
    from picompile_codegen import cuda
    from picompile_codegen.cuda.build import build_cuda
    from picompile_codegen.specs import PingPongSpec

    with progress.step("hot device"):
        # The runtime asks with the last one whether the GPU sees what the host writes.
        files = build_cuda(
            [*lowered.accelerator_built.values(), cuda.write_kernel(PingPongSpec())], folder / "kernels", sm
        )
    return {"kind": "cuda", "sm": sm, **{role: f"kernels/{name}" for role, name in files.items()}}
