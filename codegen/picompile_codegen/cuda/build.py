"""NVRTC, NVIDIA's compiler of CUDA C as a library, from the packages of the extra `cuda`. It needs no GPU, no driver.

The release is pinned to 12.8, the oldest that knows all architectures of the table of targets: PTX of a newer one is
refused by drivers that are older than it. Cubins of 12.8 load with drivers for CUDA 12.0 and later (CUDA's "minor
version compatibility"), its PTX with those for 12.8 and later.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from picompile_codegen.build.interfaces import interfaces
from picompile_codegen.build.object_cache import cached_object, cached_text, object_key
from picompile_codegen.cuda.function import CudaKernel, Grid
from picompile_codegen.errors import BuildError, CodegenError, ToolchainError
from picompile_passes.extras import install_extra

_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    # TVM declares variables that it then does not use.
    "--diag-suppress=177",
)
_HEADERS = "nvidia.cuda_runtime"


def require_nvrtc() -> None:
    """Raise `ToolchainError` unless CUDA code can be compiled here."""
    _nvrtc()
    _headers()


def nvrtc_version() -> str:
    """Return the version of the compiler's package."""
    return version("nvidia-cuda-nvrtc-cu12")


def compile_cuda(source: str, sm: int) -> tuple[bytes, bytes]:
    """Return the cubin for compute capability `sm` / 10, and the PTX that the drivers of newer GPUs compile.

    Raises `ToolchainError` where there is no NVRTC, `BuildError` with its message where it refuses the source.
    """
    nvrtc = _nvrtc()
    options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture=sm_{sm}", f"-I{_headers()}")]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"device.cu", 0, [], []), nvrtc)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program, nvrtc)
            reason = _first_error(log.decode(errors="replace"))
            raise BuildError(f"NVRTC cannot compile the kernels for sm_{sm}: {reason}")
        return (
            _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program, nvrtc),
            # The zero that ends it for C is counted in its size, and belongs in no file of text.
            _output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program, nvrtc).rstrip(b"\0"),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc.nvrtcVersion(), nvrtc)
    except (ImportError, RuntimeError) as error:
        raise _missing() from error
    return nvrtc


def _headers() -> Path:
    try:
        found = find_spec(_HEADERS)
        nvrtc_version()
    except (ImportError, PackageNotFoundError) as error:
        raise _missing() from error
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        if (Path(folder) / "include" / "cuda_fp16.h").is_file():
            return Path(folder) / "include"
    raise _missing()


def _missing() -> ToolchainError:
    return ToolchainError(f"code for GPUs is compiled with NVRTC, which is not installed: {install_extra('cuda')}")


def _checked(result: tuple[Any, ...], nvrtc: Any) -> Any:
    """Return the result of a call, after a check of its status."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _output(size: Any, content: Any, program: Any, nvrtc: Any) -> bytes:
    data = bytes(_checked(size(program), nvrtc))
    _checked((*content(program, data), None), nvrtc)
    return data


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line]
    return lines[0] if lines else log.strip()


# A cubin names the registers of its functions, and the memory that a thread or a block takes. It is an ELF file of 64
# bits. Its section `.nv.info` has records: format and attribute, a byte each, and the size of what follows, 16 bits;
# those of interest hold the number of a function's symbol and a value, 32 bits each. The numbers of the attributes are
# those that `cuobjdump -elf` prints names for.


_SIZED = 4  # the format of records that have a size
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT
_SYMBOL_BYTES = 24


@dataclass(frozen=True)
class Resources:
    """Resources of a function: registers and local memory of a thread (spills are there), shared memory of a block."""

    registers: int
    local_bytes: int
    shared_bytes: int


def function_resources(cubin: bytes) -> dict[str, Resources]:
    """Return the resources of every function of `cubin` by name. Raises `BuildError` if it is no cubin."""
    try:
        sections = _sections(cubin)
        names = _symbols(sections[".symtab"], sections[".strtab"])
        found: dict[int, dict[str, int]] = {}
        for attribute, symbol, value in _records(sections[".nv.info"]):
            found.setdefault(symbol, {})["registers" if attribute == _REGISTERS else "local_bytes"] = value
        return {
            names[symbol]: Resources(
                values["registers"], values.get("local_bytes", 0), len(sections.get(f".nv.shared.{names[symbol]}", b""))
            )
            for symbol, values in found.items()
            if "registers" in values
        }
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise BuildError(f"the compiler of CUDA code returned no cubin ({error!r})") from error


def _sections(cubin: bytes) -> dict[str, bytes]:
    if cubin[:4] != b"\x7fELF":
        raise ValueError("no ELF file")
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + size * i) for i in range(count)]
    contents = [_content(cubin, header) for header in headers]
    return {
        _cubin_text(contents[names_at], header[0]): content for header, content in zip(headers, contents, strict=True)
    }


def _content(cubin: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    without_content = 8  # SHT_NOBITS
    return bytes(size) if kind == without_content else cubin[offset : offset + size]


def _symbols(table: bytes, texts: bytes) -> list[str]:
    places = (struct.unpack_from("<I", table, start)[0] for start in range(0, len(table), _SYMBOL_BYTES))
    return [_cubin_text(texts, place) for place in places]


def _records(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (attribute, symbol, value) of the records of interest."""
    place = 0
    while place < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form != _SIZED:
            continue
        if attribute in (_FRAME_SIZE, _REGISTERS):
            yield attribute, *struct.unpack_from("<II", info, place)
        place += size


def _cubin_text(texts: bytes, start: int) -> str:
    return texts[start : texts.index(b"\0", start)].decode()


# All kernels are one CUDA C source, with a description of how each is launched.


_PRELUDE = [Path(__file__).with_name(name) for name in ("instructions.cuh", "prelude.cuh")]
# TVM's source is the same for all of these kernels' architectures; the compiler of CUDA C is told the real one.
_ARCH = "sm_75"
_DEFINITION = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((\d+)\) (\w+)\(([^)]*)\) \{\n.*?\n\}\n', re.DOTALL
)
_PARAMETER = re.compile(r"^\s*(?:const )?[\w ]+\*\s*__restrict__ (\w+)_ptr$")


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel: the function `symbol`, and which arguments of the kernel's call are its parameters."""

    symbol: str
    grid: Grid
    args: tuple[int, ...]


@dataclass(frozen=True)
class CudaSource:
    """CUDA C, and the launches of each kernel in it by the kernel's name.

    `copies` has, for those that the copy engine runs, which argument is copied to which one.
    """

    text: str
    launches: Mapping[str, tuple[KernelLaunch, ...]]
    copies: Mapping[str, tuple[int, int]]


def cuda_source(kernels: Iterable[CudaKernel]) -> CudaSource:
    """Return the source of `kernels`, in the order of their names. Raises `BuildError` with TVM's message."""
    unique = {kernel.name: kernel for kernel in kernels}
    texts: list[str] = [path.read_text(encoding="utf-8") for path in _PRELUDE]
    launches, copies = {}, {}
    for name in sorted(unique):
        kernel = unique[name]
        if kernel.copied is not None:
            source, target = map(kernel.params.index, kernel.copied)
            copies[name] = source, target
            continue
        definitions, launches[name] = _generate(kernel)
        texts += definitions
    return CudaSource("\n".join(texts), launches, copies)


def _generate(kernel: CudaKernel) -> tuple[list[str], tuple[KernelLaunch, ...]]:
    text = cached_text(object_key(kernel.digest, _ARCH, version("apache-tvm")), partial(_source_of, kernel))
    found = list(_DEFINITION.finditer(text))
    if len(found) != len(kernel.grids):
        raise CodegenError(f"kernel {kernel.name}: {len(kernel.grids)} launches became {len(found)} functions")
    launches = []
    for match, grid in zip(found, kernel.grids, strict=True):
        if int(match[1]) != grid.threads:
            raise CodegenError(f"kernel {kernel.name}: {match[2]} has {match[1]} threads instead of {grid.threads}")
        launches.append(KernelLaunch(match[2], grid, tuple(_arguments(kernel, match[3]))))
    bounded = [_bounded(match[0], grid) for match, grid in zip(found, kernel.grids, strict=True)]
    return [_written_by_others(definition, kernel) for definition in bounded], tuple(launches)


def _source_of(kernel: CudaKernel) -> str:
    target = Target({"kind": "cuda", "arch": _ARCH})
    try:
        module = tvm.compile(tvm.IRModule({kernel.name: kernel.prim_func}), target=target).mod
        return str(module.imports[0].inspect_source())
    except Exception as error:  # TVM raises many types, none of them its own
        raise BuildError(f"TVM cannot generate CUDA code of the kernel {kernel.name}: {error}") from error


def _bounded(definition: str, grid: Grid) -> str:
    """Add the number of resident blocks to the launch bounds, where TVM writes the number of threads alone."""
    bounds = f"__launch_bounds__({grid.threads}"
    return definition.replace(f"{bounds})", f"{bounds}, {grid.resident})", 1) if grid.resident else definition


def _written_by_others(definition: str, kernel: CudaKernel) -> str:
    """Return a launch whose written arguments are not `__restrict__`.

    By that word the compiler may take it that only this thread writes there, and keep what it has read across a
    barrier, behind which other threads' values are read. Arguments that are only read keep it: they are read by
    instructions for memory that nobody changes.
    """
    for argument in kernel.arguments:
        if argument.access != "in":
            name = f"{argument.name.replace('.', '_')}_ptr"
            definition = definition.replace(f"__restrict__ {name}", name, 1)
    return definition


def _arguments(kernel: CudaKernel, parameters: str) -> Iterable[int]:
    """Yield which arguments the parameters of a launch are, by name: TVM reorders them and omits unused ones."""
    names = [name.replace(".", "_") for name in kernel.params]
    for parameter in filter(None, (each.strip() for each in parameters.split(","))):
        match = _PARAMETER.match(parameter)
        if match is None or match[1] not in names:
            raise CodegenError(f"kernel {kernel.name}: {parameter!r} is none of its arguments")
        yield names.index(match[1])


# The files of an artifact are the source, the cubin, the PTX and the description of the launches.


FILES = {"cubin": "device.cubin", "ptx": "device.ptx", "launches": "device.json"}
SOURCE = "device.cu"
# Kernels that no program may call.
_OF_THE_RUNTIME = ("ping_pong",)


def build_cuda(kernels: Iterable[CudaKernel], folder: Path, sm: int) -> Mapping[str, str]:
    """Write the code of `kernels` for compute capability `sm` / 10 into `folder`; return the names of its files by
    role.

    The source is written beside them, for people. Raises `BuildError` and `ToolchainError`.
    """
    kernels = tuple(kernels)
    source = cuda_source(kernels)
    (folder / SOURCE).write_text(source.text, encoding="utf-8")
    cubin, ptx = folder / FILES["cubin"], folder / FILES["ptx"]
    compiled = cache(partial(compile_cuda, source.text, sm))
    for part, path in enumerate((cubin, ptx)):
        key = object_key(source.text, f"sm_{sm}", nvrtc_version(), path.suffix)
        path.write_bytes(cached_object(key, partial(_part, compiled, part)))
    launches = launches_json(source, function_resources(cubin.read_bytes()), sm)
    content = launches | {"interfaces": interfaces(kernel for kernel in kernels if kernel.name not in _OF_THE_RUNTIME)}
    (folder / FILES["launches"]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return FILES


def launches_json(source: CudaSource, resources: Mapping[str, Resources], sm: int) -> dict[str, Any]:
    """Return the content of device.json: for each kernel its launches, and the resources that each takes."""
    return {
        "sm": sm,
        "ptx_sm": sm,
        "kernels": {
            name: [_launch(launch, resources[launch.symbol]) for launch in launches]
            for name, launches in source.launches.items()
        },
        "copies": {name: list(pair) for name, pair in source.copies.items()},
    }


def _part(compiled: Callable[[], tuple[bytes, bytes]], part: int) -> bytes:
    return compiled()[part]


def _launch(launch: KernelLaunch, resources: Resources) -> dict[str, Any]:
    return {
        "symbol": launch.symbol,
        "grid": [launch.grid.x, launch.grid.y, 1],
        "block": [launch.grid.threads, 1, 1],
        "args": list(launch.args),
        **vars(resources),
    }
