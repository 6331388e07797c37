"""`picompile doctor`: describe this machine, and check that picompile works on it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.progress import progress
from picompile.errors import PicompileError
from picompile.machine.targets import TARGETS, find_native_target
from picompile.quantities import format_bytes

if TYPE_CHECKING:
    from picompile.machine.measured import LocalMachine

# Further vector extensions that are shown; code may be made for them one day.
_OF_INTEREST = ("avx512", "avx_vnni", "amx", "sve", "i8mm")
_PACKAGES = ("torch", "transformers", "apache-tvm", "apache-tvm-ffi", "tokenizers", "safetensors", "numpy")
# The extra `cuda`; importing what uses them takes seconds.
_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "cuda-bindings")


class UnfitMachineError(PicompileError):
    """This machine lacks something that compiling or running needs."""

    exit_code = 6


@dataclass(frozen=True)
class Finding:
    """One line of the report; `missing` says what cannot be done because of it, or is empty."""

    name: str
    value: str
    missing: str = ""


def doctor_command(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory and GPU again, even if they were measured before.")
    ] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Describe this machine and say what picompile lacks on it.

    Speeds of memory and GPU are measured once and kept in the cache folder.
    Ends with exit code 6 where something is missing.

    \b
    Examples:
      picompile doctor
      picompile doctor --measure
      picompile doctor --json
    """
    from picompile.machine.measured import measure_local

    with progress() as shown, shown.step("measure memory and GPU"):
        local = measure_local(anew=measure)
    findings = list(examine(local))
    if json_output:
        facts: dict[str, object] = {finding.name: finding.value for finding in findings}
        facts["missing"] = [finding.missing for finding in findings if finding.missing]
        facts["local"] = _local_facts(local)
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        for finding in findings:
            mark = "✗" if finding.missing else " "
            print(f"{mark} {finding.name:20s} {finding.value}")
    if missing := [finding.missing for finding in findings if finding.missing]:
        raise UnfitMachineError("; ".join(missing))


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


def _local_facts(local: "LocalMachine") -> dict[str, object]:
    """Return the measurements as numbers: the target `local` and the host's memory."""
    return {
        "target": asdict(local.target),
        "host_bytes": local.host.bytes,
        "host_bytes_per_s": local.host.bytes_per_s,
        "host_scattered_share": local.host.scattered_share,
        "gpu": None if local.speed is None else asdict(local.speed),
        "no_gpu": local.no_gpu,
        "measured_at_s": local.measured_at_s,
    }


def _compiler() -> Finding:
    path = shutil.which("gcc")
    if path is None:
        return Finding("gcc", "not found", "gcc is needed to compile a model; running an artifact needs none")
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
        return Finding(name, "not installed", f"{name} is not installed")


def _nvrtc() -> Finding:
    """Return whether NVRTC is there, which only targets with a GPU need."""
    try:
        versions = [version(name) for name in _NVRTC_PACKAGES]
    except PackageNotFoundError:
        return Finding("nvrtc", "not installed; targets with a GPU need it: pip install 'picompile[cuda]'")
    return Finding("nvrtc", f"{versions[0]}, compiles for targets with a GPU")


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
