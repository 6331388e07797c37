"""Facts about this machine that compiling and running depend on, each in a line; and what is missing."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from picompile.machine.targets import TARGETS, find_native_target
from picompile.quantities import format_bytes
from picompile_passes.extras import EXTRAS, install_command, install_extra

if TYPE_CHECKING:
    from picompile.machine.measured import LocalMachine

# Further vector extensions that are shown; code may be made for them one day.
_OF_INTEREST = ("avx512", "avx_vnni", "amx", "sve", "i8mm")
_PACKAGES = (
    *(
        "torch",
        "transformers",
        "apache-tvm",
        "apache-tvm-ffi",
        "tokenizers",
        "safetensors",
        "gguf",
        "highspy",
        "jinja2",
    ),
    "numpy",
)
# Names of the packages of the extra `cuda`; importing what uses them takes seconds.
_NVRTC_PACKAGES = tuple(re.split("[<>=]", package)[0] for package in EXTRAS["cuda"])


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    `missing` says what cannot be done because of it, or is empty; `mend` is the command that mends that, or is empty.
    """

    name: str
    value: str
    missing: str = ""
    mend: str = ""


def examine(local: "LocalMachine") -> Iterator[Finding]:
    """Yield all findings; those about speed are the measurements of `local`."""
    from picompile_runtime.devices.machine import cpu_features, default_threads

    old = "" if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed"
    yield Finding("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}", old)
    yield _compiler()
    yield Finding("processor", local.machine.cpu)
    yield from _features(cpu_features())
    yield Finding("cores", f"{default_threads()} used by default, {os.cpu_count()} hardware threads")
    yield Finding("memory", _memory())
    yield Finding("memory bandwidth", f"{format_bytes(local.host.bytes_per_s)}/s, reading")
    yield Finding("scattered rows", f"{local.host.scattered_share * 100:.0f} % of it, reading rows that lie apart")
    for package in _PACKAGES:
        yield _package(package)
    yield _nvrtc()
    yield from _gpu(local)
    yield Finding("measured", _age(time() - local.measured_at_s))


def _compiler() -> Finding:
    path = shutil.which("gcc")
    if path is None:
        missing = "gcc is needed to compile a model; running an artifact needs none"
        return Finding("gcc", "not found", missing, "sudo apt install gcc  # or dnf, pacman, zypper, apk")
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=False)
    return Finding("gcc", done.stdout.strip() or path)


def _features(present: frozenset[str]) -> Iterator[Finding]:
    """Yield the processor's features that code is made for, and the code that would be used here."""
    rows = [row for row in TARGETS.values() if row.compiles and row.machine == platform.machine()]
    used = list(dict.fromkeys(feature for row in rows for feature in row.features))
    also = sorted(name for name in present - {*used} if name.startswith(_OF_INTEREST))
    lacking = [feature for feature in rows[0].features if feature not in present] if rows else []
    missing = f"this processor has no {', '.join(lacking)}, which artifacts need" if lacking else ""
    yield Finding("instruction sets", ", ".join([name for name in used if name in present] + also), missing)
    native = find_native_target()
    if native is not None:
        yield Finding("code", f"{native.isas[0]} is the best for it: --target native, or {native.name}")
    elif not missing:
        yield Finding("code", "none", f"no code can be made for {platform.machine()}")


def _memory() -> str:
    from picompile.machine.host import host_memory

    total, available = host_memory()
    return f"{format_bytes(total)}, {format_bytes(available)} available"


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", f"{name} is not installed", install_command(_requirement(name)))


def _requirement(name: str) -> str:
    """Return what picompile requires of a package, as pip writes it; its name if this picompile was not installed."""
    with suppress(PackageNotFoundError):
        for line in requires("picompile") or ():
            if re.match(rf"{re.escape(name)}(?![\w.-])", line):
                return line.partition(";")[0].strip()
    return name


def _nvrtc() -> Finding:
    """Return whether NVRTC is there, which only targets with a GPU need."""
    try:
        versions = {name: version(name) for name in _NVRTC_PACKAGES}
    except PackageNotFoundError:
        return Finding("nvrtc", f"not installed; targets with a GPU need it: {install_extra('cuda')}")
    return Finding("nvrtc", f"{versions['nvidia-cuda-nvrtc-cu12']}, compiles for targets with a GPU")


def _gpu(local: "LocalMachine") -> Iterator[Finding]:
    gpu, speed = local.machine.gpu, local.speed
    if gpu is None or speed is None:
        yield Finding("gpu", f"{_gpu_without_driver() or 'none'}; {local.no_gpu}")
        return
    memory = f"{format_bytes(gpu.total_bytes)}, {format_bytes(speed.free_bytes)} free when measured"
    targets = ", ".join(row.name for row in TARGETS.values() if row.architecture == f"sm_{gpu.sm}")
    code = f"; --target with code for it: {targets}" if targets else ""
    yield Finding("gpu", f"{gpu.name}, sm_{gpu.sm}, {memory}, CUDA {gpu.driver}{code}")
    yield Finding("gpu bandwidth", f"{format_bytes(speed.copy_bytes_per_s)}/s, copying")
    down, up = format_bytes(speed.down_bytes_per_s), format_bytes(speed.up_bytes_per_s)
    yield Finding("pcie bandwidth", f"{down}/s to the GPU, {up}/s from it")
    yield Finding("gpu exchange", f"{speed.exchange_s * 1e6:.1f} µs, a vector there and back")
    yield Finding("gpu launch", f"{speed.launch_gap_s * 1e6:.1f} µs, a node in a graph that does nothing else")


def _gpu_without_driver() -> str:
    """Return the GPUs that the driver's kernel module knows; it may be there without libcuda."""
    return ", ".join(
        line.partition(":")[2].strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("Model:")
    )


def _age(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // size)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago; --measure does it anew"
    return "just now"
