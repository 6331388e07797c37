"""The kernels of a program once more, written for another instruction set."""

from collections.abc import Callable, Hashable, Mapping

from picompile_codegen.errors import CodegenError
from picompile_codegen.isa import Isa, targeting
from picompile_codegen.kernels import Kernel

# A kernel's builder and the parameters that it was called with.
Recipe = tuple[Callable[..., Kernel], tuple[tuple[str, Hashable], ...]]


def kernels_for(isa: Isa, built: Mapping[Recipe, Kernel]) -> tuple[Kernel, ...]:
    """Each of `built` from its recipe, for `isa`.

    Raises `CodegenError` for a kernel with another name or other arguments there: one program serves the code of all
    instruction sets.
    """
    with targeting(isa):
        again = tuple(builder(**dict(parameters)) for builder, parameters in built)
    for kernel, other in zip(built.values(), again, strict=True):
        if (kernel.name, kernel.arguments) != (other.name, other.arguments):
            raise CodegenError(f"kernel {kernel.name} has another name or other arguments for {isa.name}")
    return again
