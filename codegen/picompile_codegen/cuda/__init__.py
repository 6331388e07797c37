"""The bodies of kernels for NVIDIA GPUs: TVM TIR to CUDA C."""

from picompile_codegen.backend import body_of
from picompile_codegen.cuda.build import CudaSource, cuda_source
from picompile_codegen.cuda.function import CudaFunction, CudaKernel
from picompile_codegen.specs import KernelSpec

__all__ = ["CudaKernel", "CudaSource", "cuda_source", "write_kernel"]


def write_kernel(spec: KernelSpec) -> CudaKernel:
    """Return the CUDA kernel of `spec`.

    Raises:
        UnsupportedGraphError: For a spec that has no body here.
    """
    write, function = body_of(spec, __name__), CudaFunction(spec)
    with function:
        write(spec, function)
    return function.cuda_kernel()
