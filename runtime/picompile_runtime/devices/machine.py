"""Instruction sets of this machine, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown, whole_number

_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")


def quota_cores(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> int | None:
    """Return how many whole cores, at least one, the process's control groups allow it; None without a quota.

    Control groups are how a container, a service or a job is limited (cgroups(7)). The tightest quota counts. `groups`
    lists the process's groups, `mounts` is the folder where they are.
    """
    quotas = [quota for folder in _folders(groups, mounts, "cpu") for quota in _quota(folder)]
    return max(1, int(min(quotas))) if quotas else None


def memory_bytes(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> int:
    """Return the memory in bytes that this process may have: the machine's, or less if its control groups say so.

    For `groups` and `mounts` see `quota_cores`.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for folder in _folders(groups, mounts, "memory") for limit in _memory_limit(folder))])


def _memory_limit(folder: Path) -> Iterator[int]:
    """Yield the limit of one group in bytes, if it has one, for version 2 or 1 of control groups."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: "max"
            yield int((folder / name).read_text())


def _folders(groups: Path, mounts: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of each group that may limit this process by a controller, and those of the groups around it.

    A container sees its own group at the mount point, sometimes with a path that exists only outside of it.
    """
    lines = []
    with suppress(OSError):
        lines = groups.read_text().splitlines()
    paths = {
        controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1)
    }
    for controllers, path in {"": "/", **paths}.items():
        if controllers == "":
            roots = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            roots = [mounts / controller, mounts / controllers]
        else:
            continue
        for root in roots:
            folder = root / path.lstrip("/")
            yield from (part for part in (folder, *folder.parents) if part == root or root in part.parents)


def _quota(folder: Path) -> Iterator[float]:
    """Yield the quota of one group in cores, if it has one, for version 2 or 1 of control groups."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)


MOST_THREADS = 256  # host.c: PI_MAX_THREADS
_MOST_DEFAULT_THREADS = 64  # decoding is bound by memory long before this


def cpu_features() -> frozenset[str]:
    """Return the processor's features as Linux spells them (`avx2`, `asimd`, …); empty if it does not say.

    x86 lists them as `flags`, AArch64 as `Features`. Features whose state the system cannot save are not among them.
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def is_machine(machine: str) -> bool:
    """Return whether this is Linux on a `machine`, as `uname -m` spells it."""
    return (platform.system(), platform.machine()) == ("Linux", machine)


def missing_features(features: Sequence[str]) -> list[str]:
    """Return those of `features` that this machine's processor lacks, sorted."""
    return sorted(set(features) - cpu_features())


def default_threads() -> int:
    """Return PICOMPILE_THREADS if it is set, else the number of physical cores that this process may use.

    Waiting threads spin, so more threads than a container's quota of cores would slow each other down. Raises
    RequestError for a wrong PICOMPILE_THREADS.
    """
    if asked := os.environ.get("PICOMPILE_THREADS"):
        if not re.fullmatch("0*[0-9]{1,9}", asked):
            raise RequestError(f"PICOMPILE_THREADS must be a number from 1 to {MOST_THREADS}, not {shown(asked)}")
        return check_threads(int(asked[-9:]))
    cores = {_physical_core(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), quota_cores() or MOST_THREADS, _MOST_DEFAULT_THREADS))


def check_threads(threads: int) -> int:
    """Return `threads`. Raises RequestError unless it is a whole number from 1 to 256."""
    return whole_number("the number of threads", threads, 1, MOST_THREADS)


def _physical_core(cpu: int) -> str:
    """Return a text that is the same for all hardware threads of a core, since they share its way to memory."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
