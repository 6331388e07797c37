"""NVRTC, NVIDIA's compiler of CUDA C as a library, from the packages of the extra `cuda`. It needs no GPU, no driver.

The release is pinned to 12.8, the oldest that knows all architectures of the table of targets: PTX of a newer one is
refused by drivers that are older than it. Cubins of 12.8 load with drivers for CUDA 12.0 and later (CUDA's "minor
version compatibility"), its PTX with those for 12.8 and later.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from picompile_codegen.errors import BuildError, ToolchainError

_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    # TVM declares variables that it then does not use.
    "--diag-suppress=177",
)
_HEADERS = "nvidia.cuda_runtime"


def require_nvrtc() -> None:
    """Raises `ToolchainError` unless CUDA code can be compiled here."""
    _nvrtc()
    _headers()


def nvrtc_version() -> str:
    """The version of the compiler's package."""
    return version("nvidia-cuda-nvrtc-cu12")


def compile_cuda(source: str, sm: int) -> tuple[bytes, bytes]:
    """The cubin for compute capability `sm` / 10, and the PTX that newer GPUs' drivers compile.

    Raises `ToolchainError` where there is no NVRTC, `BuildError` with its message where it refuses the source.
    """
    nvrtc = _nvrtc()
    options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture=sm_{sm}", f"-I{_headers()}")]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"device.cu", 0, [], []), nvrtc)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program, nvrtc)
            reason = _first_error(log.decode(errors="replace"))
            raise BuildError(f"NVRTC cannot compile the kernels for sm_{sm}: {reason}")
        return (
            _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program, nvrtc),
            _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program, nvrtc),
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
    return ToolchainError("code for GPUs is compiled with NVRTC, which is not installed: pip install 'picompile[cuda]'")


def _checked(result: tuple[Any, ...], nvrtc: Any) -> Any:
    """What a call returned beside its status."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _text(size: Any, content: Any, program: Any, nvrtc: Any) -> bytes:
    data = bytes(_checked(size(program), nvrtc))
    _checked((*content(program, data), None), nvrtc)
    return data


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line]
    return lines[0] if lines else log.strip()
