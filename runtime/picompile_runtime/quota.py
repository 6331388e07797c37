"""How many cores the control groups of this process give it: a container's limit, a service's, a job's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")


def quota_cores(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> int | None:
    """Whole cores, at least one, that the tightest quota allows; None without any.

    `groups` lists the process's groups, `mounts` is where they are found (cgroups(7)).
    """
    quotas = [quota for folder in _folders(groups, mounts) for quota in _quota(folder)]
    return max(1, int(min(quotas))) if quotas else None


def _folders(groups: Path, mounts: Path) -> Iterator[Path]:
    """Each group of this process that may limit its processor time, and those that it lies in.

    A container sees its own group at the mount point, sometimes under a path that exists outside only.
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
        elif "cpu" in controllers.split(","):
            roots = [mounts / "cpu", mounts / controllers]
        else:
            continue
        for root in roots:
            folder = root / path.lstrip("/")
            yield from (part for part in (folder, *folder.parents) if part == root or root in part.parents)


def _quota(folder: Path) -> Iterator[float]:
    """The quota of one group in cores, in version 2 or 1 of control groups."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)
