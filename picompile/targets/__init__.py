"""The machines that models are planned and compiled for: a table, one row a machine, and this machine as measured."""

from picompile.errors import TargetError
from picompile.targets.table import LAUNCH_S, SYNC_S, TARGETS, Target, pcie_bytes_per_s

__all__ = [
    "LAUNCH_S",
    "LOCAL",
    "SYNC_S",
    "TARGETS",
    "Target",
    "find_compiled_target",
    "find_target",
    "pcie_bytes_per_s",
    "target_names",
]

LOCAL = "local"


def target_names() -> tuple[str, ...]:
    """All that `find_target` knows."""
    return (*TARGETS, LOCAL)


def find_target(name: str) -> Target:
    """The row called `name`; `local` is this machine, measured unless it was before. Raises `TargetError`."""
    if name in TARGETS:
        return TARGETS[name]
    if name == LOCAL:
        from picompile.measure import local_target

        return local_target()
    raise TargetError(f"unknown target {name!r}; known are {', '.join(target_names())}")


def find_compiled_target(name: str) -> Target:
    """The row called `name`, if this version makes code for it. Measures nothing. Raises `TargetError`."""
    compiled = ", ".join(target.name for target in TARGETS.values() if target.compiles)
    if name == LOCAL or (name in TARGETS and not TARGETS[name].compiles):
        what = f"this version plans for target {name!r} (picompile plan), but compiles only for: {compiled}"
        raise TargetError(f"{what}; this machine's processor is cpu" if name == LOCAL else what)
    return find_target(name)
