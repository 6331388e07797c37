"""The back end for CPUs: bodies of kernels as TVM TIR, and libraries of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile_codegen.backend import BackEnd, CodeTarget

if TYPE_CHECKING:
    from picompile_codegen.cpu.kernel import Kernel, KernelFunction
    from picompile_codegen.specs.arguments import KernelSpec


def _begin(spec: "KernelSpec") -> "KernelFunction":
    from picompile_codegen.cpu.kernel import KernelFunction

    return KernelFunction(spec)


def _build(kernels: Mapping["KernelSpec", "Kernel"], folder: Path, target: CodeTarget) -> dict[str, Any]:
    """Build for each instruction set that the host has code for: whichever is chosen, both sides have it."""
    from picompile_codegen.build.host_library import build_host_library

    for isa in target.isas:
        build_host_library(BACK_END.kernels_for(isa, kernels), folder / f"hot.{isa.name}.so", isa)
    return {"code": [isa.entry(f"kernels/hot.{isa.name}.so") for isa in target.isas]}


BACK_END = BackEnd("cpu", __name__, _begin, _build)


def write_kernel(spec: "KernelSpec") -> "Kernel":
    """Return the kernel of `spec` for the current instruction set. Raises as `BackEnd.write_kernel`."""
    kernel: Kernel = BACK_END.write_kernel(spec)
    return kernel
