"""Back ends: where code for a kernel comes from.

A back end's bodies are the functions of its folder that `body` marks with the specs that they write:

    @body(NegateSpec)
    def negate(spec: NegateSpec, function: KernelFunction) -> None:
        ...
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from picompile_codegen.errors import CodegenError
from picompile_codegen.specs.arguments import KernelSpec
from picompile_passes.errors import UnsupportedGraphError

# body(spec, function): writes the statements of the kernel of `spec`.
Body = Callable[[Any, Any], None]
BodyT = TypeVar("BodyT", bound=Body)

_MARK = "__picompile_specs__"


def body(*specs: type[KernelSpec]) -> Callable[[BodyT], BodyT]:
    """Mark a function as the body of the kernels of `specs` for the back end whose folder it lies in."""

    def mark(function: BodyT) -> BodyT:
        setattr(function, _MARK, specs)
        return function

    return mark


@cache
def find_bodies(package: str) -> Mapping[type[KernelSpec], Body]:
    """Return the bodies in the modules of the folder `package`, by the type of their spec.

    Raises:
        CodegenError: If two functions are bodies of the same spec.
    """
    found: dict[type[KernelSpec], Body] = {}
    for module in iter_modules(import_module(package).__path__, f"{package}."):
        for value in vars(import_module(module.name)).values():
            if getattr(value, "__module__", None) != module.name:
                continue  # imported from where it is defined
            for spec in getattr(value, _MARK, ()):
                if found.setdefault(spec, value) is not value:
                    one, other = found[spec].__qualname__, f"{module.name}.{value.__qualname__}"
                    raise CodegenError(f"{package}: two bodies of {spec.__name__}: {one} and {other}")
    return found


def body_of(spec: KernelSpec, package: str) -> Body:
    """Return the body of `spec` in the folder `package` of a back end, or the one that the spec brings along for it.

    Raises:
        UnsupportedGraphError: If there is none.
    """
    back_end = package.rpartition(".")[2]
    found = spec.bodies().get(back_end) or find_bodies(package).get(type(spec))
    if found is None:
        raise UnsupportedGraphError(f"there is no kernel of {type(spec).__name__} for back end {back_end}")
    return found
