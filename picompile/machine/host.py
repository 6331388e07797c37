"""The processor and memory of this machine, as Linux describes them, and how fast the memory is read."""

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from picompile_runtime.bench.bandwidth import memory_bandwidth, scattered_share
from picompile_runtime.devices.memory import growth_bytes

# Files with the limit of a container's memory: control groups, version 2 and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# The buffer that is read to measure the bandwidth: as in `picompile_runtime.bench.bandwidth`, but at most this share of
# the memory.
_BUFFER_BYTES = 2**29
_BUFFER_SHARE = 8


@dataclass(frozen=True)
class Host:
    """Memory of a host: its size, and the bytes per second that all its cores together read.

    `scattered_share` is the share of that speed which is left where rows of some KB are read that lie apart, as those
    of firing neurons do.
    """

    bytes: int
    bytes_per_s: float
    scattered_share: float


def cpu_name() -> str:
    """Return the name under which the processor is sold."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory that this process may use, and how many of them are available now."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    growth = growth_bytes()
    limit = min([total + growth, *_limits()])
    return limit, min(limit, available + growth)


def _limits() -> list[int]:
    """Return the limits that are set; a file holds `max`, which is no number, if there is none."""
    limits = []
    for path in _LIMITS:
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text(encoding="utf-8")))
    return limits


def measure_host(threads: int) -> Host:
    """Measure the memory bandwidth with `threads` threads, which takes a second or two."""
    total_bytes, available_bytes = host_memory()
    size_bytes = min(_BUFFER_BYTES, available_bytes // _BUFFER_SHARE)
    return Host(total_bytes, memory_bandwidth(threads, size_bytes), scattered_share(threads, size_bytes))
