"""From CUDA kernels to one CUDA C source, and what must be known to launch each of them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import tvm
from tvm.target import Target

from picompile_codegen.cuda.function import CudaKernel, Grid
from picompile_codegen.errors import BuildError, CodegenError
from picompile_codegen.object_cache import cached_text, object_key

_PRELUDE = Path(__file__).with_name("prelude.cuh")
# TVM's source is the same for all of these kernels' architectures; the compiler of CUDA C is told the real one.
_ARCH = "sm_75"
_DEFINITION = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((\d+)\) (\w+)\(([^)]*)\) \{\n.*?\n\}\n', re.DOTALL
)
_PARAMETER = re.compile(r"^\s*(?:const )?[\w ]+\*\s*__restrict__ (\w+)_ptr$")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: the function `symbol`, and which arguments of the kernel's call are its parameters."""

    symbol: str
    grid: Grid
    args: tuple[int, ...]


@dataclass(frozen=True)
class CudaSource:
    """CUDA C, and the launches of each kernel in it by the kernel's name."""

    text: str
    launches: Mapping[str, tuple[Launch, ...]]


def cuda_source(kernels: Iterable[CudaKernel]) -> CudaSource:
    """The source of `kernels`, in the order of their names. Raises `BuildError` with TVM's message."""
    unique = {kernel.name: kernel for kernel in kernels}
    texts, launches = [_PRELUDE.read_text(encoding="utf-8")], {}
    for name in sorted(unique):
        definitions, launches[name] = _generate(unique[name])
        texts += definitions
    return CudaSource("\n".join(texts), launches)


def _generate(kernel: CudaKernel) -> tuple[list[str], tuple[Launch, ...]]:
    text = cached_text(object_key(kernel.digest, _ARCH, version("apache-tvm")), partial(_source_of, kernel))
    found = list(_DEFINITION.finditer(text))
    if len(found) != len(kernel.grids):
        raise CodegenError(f"kernel {kernel.name}: {len(kernel.grids)} launches became {len(found)} functions")
    launches = []
    for match, grid in zip(found, kernel.grids, strict=True):
        if int(match[1]) != grid.threads:
            raise CodegenError(f"kernel {kernel.name}: {match[2]} has {match[1]} threads instead of {grid.threads}")
        launches.append(Launch(match[2], grid, tuple(_arguments(kernel, match[3]))))
    return [_bounded(match[0], grid) for match, grid in zip(found, kernel.grids, strict=True)], tuple(launches)


def _source_of(kernel: CudaKernel) -> str:
    target = Target({"kind": "cuda", "arch": _ARCH})
    try:
        module = tvm.compile(tvm.IRModule({kernel.name: kernel.prim_func}), target=target).mod
        return str(module.imports[0].inspect_source())
    except Exception as error:  # TVM raises many types, none of them its own
        raise BuildError(f"TVM cannot generate CUDA code of the kernel {kernel.name}: {error}") from error


def _bounded(definition: str, grid: Grid) -> str:
    """TVM names the number of threads alone."""
    bounds = f"__launch_bounds__({grid.threads}"
    return definition.replace(f"{bounds})", f"{bounds}, {grid.resident})", 1) if grid.resident else definition


def _arguments(kernel: CudaKernel, parameters: str) -> Iterable[int]:
    """TVM orders parameters as it likes, and leaves out what a launch does not use; their names tell which is which."""
    names = [name.replace(".", "_") for name in kernel.params]
    for parameter in filter(None, (each.strip() for each in parameters.split(","))):
        match = _PARAMETER.match(parameter)
        if match is None or match[1] not in names:
            raise CodegenError(f"kernel {kernel.name}: {parameter!r} is none of its arguments")
        yield names.index(match[1])
