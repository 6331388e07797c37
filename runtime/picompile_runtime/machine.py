"""What this machine offers: instruction sets, and cores that this process may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from picompile_runtime.errors import RequestError
from picompile_runtime.quota import quota_cores

MOST_THREADS = 256  # host.c: PI_MAX_THREADS
_MOST_DIGITS = 9
_MOST_DEFAULT_THREADS = 64  # decoding is bound by memory long before this


def cpu_features() -> frozenset[str]:
    """Instruction set names as Linux spells them (`avx2`, `asimd`, …); empty where it does not say.

    x86 lists them as `flags`, AArch64 as `Features`. What the system cannot save for a process is not among them.
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def is_machine(machine: str) -> bool:
    """Whether this is Linux on a `machine`, as `uname -m` says it."""
    return (platform.system(), platform.machine()) == ("Linux", machine)


def missing_features(features: Sequence[str]) -> list[str]:
    """Those of `features` that this machine's processor lacks."""
    return sorted(set(features) - cpu_features())


def default_threads() -> int:
    """PICOMPILE_THREADS where it is set, else the physical cores that this process may use.

    Waiting threads spin: more than a container's quota of cores would only be in the way.
    """
    if asked := os.environ.get("PICOMPILE_THREADS"):
        # Python reads no number of more than 4,300 digits.
        if not asked.isascii() or not asked.isdigit() or len(asked) > _MOST_DIGITS:
            raise RequestError(f"PICOMPILE_THREADS must be a number from 1 to {MOST_THREADS}, not {asked[:40]!r}")
        return check_threads(int(asked))
    cores = {_physical_core(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), quota_cores() or MOST_THREADS, _MOST_DEFAULT_THREADS))


def check_threads(threads: int) -> int:
    """`threads` itself; RequestError if no run can have so many."""
    if not 1 <= threads <= MOST_THREADS:
        raise RequestError(f"the number of threads must be from 1 to {MOST_THREADS}, not {threads}")
    return threads


def _physical_core(cpu: int) -> str:
    """The hardware threads of one core share this text; two threads on one core share its one way to memory."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
