"""The bodies of kernels as TVM TIR for a CPU."""

from picompile_codegen.backend import body_of
from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.specs import KernelSpec

__all__ = ["Kernel", "write_kernel"]


def write_kernel(spec: KernelSpec) -> Kernel:
    """Return the kernel of `spec` for the current instruction set.

    Raises:
        UnsupportedGraphError: For a spec that has no body here.
    """
    write, function = body_of(spec, __name__), KernelFunction(spec)
    with function:
        write(spec, function)
    return function.kernel()
