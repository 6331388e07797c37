"""Kernels from their recipes, once for each instruction set."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any

from picompile_codegen.errors import CodegenError
from picompile_codegen.isa import Isa, current, targeting
from picompile_codegen.kernels import Kernel

# A kernel's builder and the parameters that it was called with.
Recipe = tuple[Callable[..., Any], tuple[tuple[str, Hashable], ...]]


def kernel_of(recipe: Recipe) -> Any:
    """The kernel, a `Kernel` or a `CudaKernel`, for the current instruction set; the same object for equal recipes."""
    return _kernel_of(recipe, current().name)


# Those of a model or two. To write one takes up to 0.1 s, and to tell it from others three times as long.
@lru_cache(maxsize=256)
def _kernel_of(recipe: Recipe, isa: str) -> Any:
    builder, parameters = recipe
    return builder(**dict(parameters))


def forget_kernels() -> None:
    """Has all kernels written anew: for whoever changes how that is done."""
    _kernel_of.cache_clear()


def kernels_for(isa: Isa, built: Mapping[Recipe, Kernel]) -> tuple[Kernel, ...]:
    """Each of `built` from its recipe, for `isa`.

    Raises `CodegenError` for a kernel with another name or other arguments there: one program serves the code of all
    instruction sets.
    """
    with targeting(isa):
        again = tuple(kernel_of(recipe) for recipe in built)
    for kernel, other in zip(built.values(), again, strict=True):
        if (kernel.name, kernel.arguments) != (other.name, other.arguments):
            raise CodegenError(f"kernel {kernel.name} has another name or other arguments for {isa.name}")
    return again
