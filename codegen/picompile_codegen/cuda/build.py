"""From CUDA kernels to the files of an artifact: source, cubin, PTX, and how each kernel is launched."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from picompile_codegen.cuda.cubin import Resources, function_resources
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.cuda.source import CudaSource, Launch, cuda_source
from picompile_codegen.cuda.toolchain import compile_cuda, nvrtc_version
from picompile_codegen.interfaces import interfaces
from picompile_codegen.object_cache import cached_object, object_key

FILES = {"cubin": "device.cubin", "ptx": "device.ptx", "launches": "device.json"}
SOURCE = "device.cu"
# Kernels that no program may call.
_OF_THE_RUNTIME = ("ping_pong",)


def build_cuda(kernels: Iterable[CudaKernel], folder: Path, sm: int) -> Mapping[str, str]:
    """Writes the code of `kernels` for compute capability `sm` / 10 into `folder`; the names of its files by role.

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
    """The content of device.json: for each kernel its launches, with what `cubin` says that they take."""
    return {
        "sm": sm,
        "ptx_sm": sm,
        "kernels": {
            name: [_launch(launch, resources[launch.symbol]) for launch in launches]
            for name, launches in source.launches.items()
        },
    }


def _part(compiled: Callable[[], tuple[bytes, bytes]], part: int) -> bytes:
    return compiled()[part]


def _launch(launch: Launch, resources: Resources) -> dict[str, Any]:
    return {
        "symbol": launch.symbol,
        "grid": [launch.grid.x, launch.grid.y, 1],
        "block": [launch.grid.threads, 1, 1],
        "args": list(launch.args),
        **vars(resources),
    }
