"""`picompile doctor`: what this machine is, and whether picompile works on it."""

import ctypes.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from picompile.cli.checks import format_bytes
from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.progress import progress
from picompile.errors import PicompileError
from picompile.targets import find_target

_PACKAGES = ("torch", "transformers", "apache-tvm", "apache-tvm-ffi", "tokenizers", "safetensors", "numpy")


class UnfitMachineError(PicompileError):
    """This machine lacks something that compiling or running needs."""

    exit_code = 6


@dataclass(frozen=True)
class Finding:
    """One line of the report; `missing` says what cannot be done because of it, or is empty."""

    name: str
    value: str
    missing: str = ""


def doctor_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """Describe this machine and say what picompile lacks on it.

    Ends with exit code 6 where something is missing.

    \b
    Examples:
      picompile doctor
      picompile doctor --json
    """
    with progress() as shown, shown.step("measure memory bandwidth"):
        findings = list(examine())
    if json_output:
        facts: dict[str, object] = {finding.name: finding.value for finding in findings}
        facts["missing"] = [finding.missing for finding in findings if finding.missing]
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        for finding in findings:
            mark = "✗" if finding.missing else " "
            print(f"{mark} {finding.name:18s} {finding.value}")
    if missing := [finding.missing for finding in findings if finding.missing]:
        raise UnfitMachineError("; ".join(missing))


def examine() -> Iterator[Finding]:
    """All findings. Measures the memory's bandwidth, which takes a second."""
    from picompile_runtime.bench import memory_bandwidth
    from picompile_runtime.machine import cpu_features, default_threads

    old = "" if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed"
    yield Finding("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}", old)
    yield _compiler()
    yield Finding("processor", _cpu_name())
    yield _features(cpu_features())
    yield Finding("cores", f"{default_threads()} used by default, {os.cpu_count()} hardware threads")
    yield Finding("memory", _memory())
    yield Finding("memory bandwidth", f"{format_bytes(memory_bandwidth(default_threads()))}/s, reading")
    for package in _PACKAGES:
        yield _package(package)
    yield Finding("gpu", f"{_gpu()}; not used by this version")


def _compiler() -> Finding:
    path = shutil.which("gcc")
    if path is None:
        return Finding("gcc", "not found", "gcc is needed to compile a model; running an artifact needs none")
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=False)
    return Finding("gcc", done.stdout.strip() or path)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _features(present: frozenset[str]) -> Finding:
    needed = find_target("cpu").features
    lacking = [feature for feature in needed if feature not in present]
    missing = f"this processor has no {', '.join(lacking)}, which artifacts need" if lacking else ""
    also = sorted(feature for feature in present if feature.startswith(("avx512", "avx_vnni", "amx")))
    return Finding("instruction sets", ", ".join([f for f in needed if f in present] + also), missing)


def _memory() -> str:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return f"{format_bytes(total)}, {format_bytes(free)} available"


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", f"{name} is not installed")


def _gpu() -> str:
    """What the driver says, without loading it."""
    names = [
        line.partition(":")[2].strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("Model:")
    ]
    if names:
        return ", ".join(names)
    return "driver without a device" if ctypes.util.find_library("cuda") else "none"
