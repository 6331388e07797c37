"""The back end for NVIDIA GPUs: bodies of kernels as TVM TIR, which becomes CUDA C, a cubin and PTX."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile_codegen.backend import BackEnd, CodeTarget

if TYPE_CHECKING:
    from picompile_codegen.cuda.function import CudaFunction, CudaKernel
    from picompile_codegen.specs.arguments import KernelSpec


def _begin(spec: "KernelSpec") -> "CudaFunction":
    from picompile_codegen.cuda.function import CudaFunction

    return CudaFunction(spec)


def _build(kernels: Mapping["KernelSpec", "CudaKernel"], folder: Path, target: CodeTarget) -> dict[str, Any]:
    from picompile_codegen.cuda.build import build_cuda
    from picompile_codegen.specs.transfer import PingPongSpec

    sm = int(target.architecture.removeprefix("sm_"))
    # The runtime asks with the last one whether the GPU sees what the host writes.
    files = build_cuda([*kernels.values(), write_kernel(PingPongSpec())], folder, sm)
    return {"sm": sm, **{role: f"kernels/{name}" for role, name in files.items()}}


def _require() -> None:
    from picompile_codegen.cuda.build import require_nvrtc

    require_nvrtc()


BACK_END = BackEnd(
    "cuda",
    package=__name__,
    begin=_begin,
    build=_build,
    require=_require,
    is_gpu=True,
    panels=False,
    fuses=True,
    spread_caches=False,
    counts=True,
)


def write_kernel(spec: "KernelSpec") -> "CudaKernel":
    """Return the CUDA kernel of `spec`. Raises as `BackEnd.write_kernel`."""
    kernel: CudaKernel = BACK_END.write_kernel(spec)
    return kernel
