"""What an artifact has for its hot device: which one, what of the model runs there, and its code."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from picompile.progress import Progress
from picompile.targets import gpu_of

if TYPE_CHECKING:
    from picompile.code import Code
    from picompile.compile_options import CompileOptions
    from picompile.placement.plan import Plan
    from picompile_codegen.lower import Lowered
    from picompile_codegen.placement import Placement


@dataclass(frozen=True)
class DeviceTarget:
    """A hot device: a second partition of the CPU, or a GPU of compute capability `sm` / 10."""

    kind: Literal["cpu", "cuda"]
    sm: int = 0

    def build(self, code: "Sequence[Code]", lowered: "Lowered", folder: Path, progress: Progress) -> dict[str, Any]:
        """Compiles its kernels into the artifact's `folder`; the entry of the manifest. Raises `BuildError`."""
        if self.kind == "cpu":
            return _build_cpu(code, lowered, folder, progress)
        return _build_cuda(self.sm, lowered, folder, progress)


def device_target(options: "CompileOptions") -> DeviceTarget | None:
    """The hot device that is compiled for, None where there is none.

    Raises `ToolchainError` where there is nothing to make its code with.
    """
    if options.device is None:
        return None
    gpu = gpu_of(options.target)
    if options.device == "cpu" or gpu is None or gpu.sm is None:
        return DeviceTarget("cpu")
    from picompile_codegen.cuda.toolchain import require_nvrtc

    require_nvrtc()
    return DeviceTarget("cuda", gpu.sm)


def placement(plan: "Plan | None", layers: int) -> "Placement":
    """What of a model runs on the hot device beside hot neurons: what the plan says, or all that can."""
    from picompile_codegen.placement import Placement

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
    from picompile_codegen.build import build_host_library

    variants = [replace(each, file=f"kernels/hot.{each.isa.name}.so") for each in code]
    with progress.step("hot device", len(variants)) as advance:
        for each in variants:
            build_host_library(lowered.device_kernels_for(each.isa), folder / each.file, each.isa)
            advance(1)
    return {"kind": "cpu", "code": [each.to_json() for each in variants]}


def _build_cuda(sm: int, lowered: "Lowered", folder: Path, progress: Progress) -> dict[str, Any]:
    from picompile_codegen import cuda
    from picompile_codegen.cuda.build import build_cuda

    with progress.step("hot device"):
        # The runtime asks with the last one whether the GPU sees what the host writes.
        files = build_cuda([*lowered.device_built.values(), cuda.ping_pong()], folder / "kernels", sm)
    return {"kind": "cuda", "sm": sm, **{role: f"kernels/{name}" for role, name in files.items()}}
