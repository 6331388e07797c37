"""Back ends: where code for a kernel comes from.

A back end is a folder with a `BackEnd`, found by its name in `picompile_codegen.registry`. Its bodies are the functions
of the folder that `body` marks with the specs that they write:

    @body(NegateSpec)
    def negate(spec: NegateSpec, function: KernelFunction) -> None:
        ...

This module imports neither torch nor TVM, and no folder of a back end does before a kernel is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from picompile_codegen.build.isa import Isa, current, targeting
from picompile_codegen.errors import CodegenError
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.plugins import mark, marked

if TYPE_CHECKING:
    from picompile_codegen.specs.arguments import KernelSpec

# body(spec, function): writes the statements of the kernel of `spec`.
Body = Callable[[Any, Any], None]
BodyT = TypeVar("BodyT", bound=Body)

# A model or two have this many. Writing one takes up to 0.1 s, and comparing it with others three times as long.
_KEPT_KERNELS = 512


def body(*specs: "type[KernelSpec]") -> Callable[[BodyT], BodyT]:
    """Mark a function as the body of the kernels of `specs` for the back end whose folder it lies in."""
    return mark("bodies", *specs)


@cache
def find_bodies(package: str) -> Mapping["type[KernelSpec]", Body]:
    """Return the bodies in the modules of the folder `package`, by the type of their spec.

    Raises:
        RegistryError: If two functions are bodies of the same spec.
    """
    return marked("bodies", package)


@dataclass(frozen=True)
class CodeTarget:
    """The machine that an accelerator's code is for.

    `isas` are the instruction sets that the host has code for, best first; `architecture` is that of the
    target's GPU, as its back end calls it, and empty without one.
    """

    isas: tuple[Isa, ...]
    architecture: str = ""


@dataclass(frozen=True)
class BackEnd:
    """One way to make code for kernels.

    Attributes:
        name: how options, manifests and entry points call it.
        package: the folder of its kernels' bodies.
        begin: `begin(spec)` returns a kernel to be written, a `picompile_codegen.cpu.kernel.KernelFunction`.
        build: `build(kernels, folder, target)` writes the code of an accelerator's kernels, by their specs, into the
            artifact's folder `kernels/`, and returns the accelerator's entry of manifest.json without its kind. Texts
            among its values that name files are relative to the artifact.
        require: raises `ToolchainError` where code cannot be built on this machine.
        is_gpu: whether it makes code for the GPU of a target.
        panels: whether matrices lie in panels of rows (`formats/panels.py`) wherever they can, and not only those in
            formats that have no rows, and those of blocks that compute every neuron.
        fuses: whether it has kernels that do what several nodes ask for (`lowering/fusion.py`).
        spread_caches: whether its attention reads caches whose groups are spread (`Codec.spread_cache`).
        counts: whether its kernels are told how many neurons they compute, so that layers share them
            (`lowering/neuron_bounds.py`).
    """

    name: str
    package: str
    begin: Callable[["KernelSpec"], Any]
    build: Callable[[Mapping["KernelSpec", Any], Path, CodeTarget], dict[str, Any]]
    require: Callable[[], None] = lambda: None
    is_gpu: bool = False
    panels: bool = True
    fuses: bool = False
    spread_caches: bool = True
    counts: bool = False

    def write_kernel(self, spec: "KernelSpec") -> Any:
        """Return the kernel of `spec`, for the current instruction set where there are several.

        Raises:
            UnsupportedGraphError: For a spec that has no body here.
        """
        write = spec.bodies().get(self.name) or find_bodies(self.package).get(type(spec))
        if write is None:
            raise UnsupportedGraphError(f"there is no kernel of {type(spec).__name__} for back end {self.name}")
        function = self.begin(spec)
        with function:
            write(spec, function)
        return function.kernel()

    def kernel(self, spec: "KernelSpec") -> Any:
        """Return what `write_kernel` returns, the same object for equal specs."""
        return _kept_kernel(self, spec, current())

    def kernels_for(self, isa: Isa, built: Mapping["KernelSpec", Any]) -> tuple[Any, ...]:
        """Return each of `built`, by its spec, for `isa`.

        Raises:
            CodegenError: For a kernel with another name or other arguments there: one program serves the code of all
                instruction sets.
        """
        with targeting(isa):
            again = tuple(self.kernel(spec) for spec in built)
        for kernel, other in zip(built.values(), again, strict=True):
            if (kernel.name, kernel.arguments) != (other.name, other.arguments):
                raise CodegenError(f"kernel {kernel.name} has another name or other arguments for {isa.name}")
        return again


@lru_cache(maxsize=_KEPT_KERNELS)
def _kept_kernel(back_end: BackEnd, spec: "KernelSpec", isa: Isa) -> Any:
    return back_end.write_kernel(spec)


def forget_kernels() -> None:
    """Forget the kernels that were written, for tests that change how they are written."""
    _kept_kernel.cache_clear()
