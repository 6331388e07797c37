"""The machines that picompile knows: a table, one row a machine."""

from dataclasses import dataclass

from picompile.errors import TargetError


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    `features` are the instruction sets that the compiled code needs, as the kernel names them in /proc/cpuinfo.
    """

    name: str
    description: str
    machine: str
    features: tuple[str, ...]


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (Target("cpu", "x86-64 processor with AVX2 (x86-64-v3)", "x86_64", ("avx2", "fma", "f16c")),)
}

# Named so that asking for one is answered with "not yet" instead of "unknown".
PLANNED_TARGETS = ("2080ti", "3060", "3090", "4060", "4070", "4080", "4090", "5090", "a100", "h100", "local")


def find_target(name: str) -> Target:
    """The row called `name`. Raises `TargetError` for one that is unknown or cannot be compiled for yet."""
    if name in TARGETS:
        return TARGETS[name]
    known = ", ".join(TARGETS)
    if name in PLANNED_TARGETS:
        raise TargetError(f"target {name!r} is not supported yet; this version compiles for: {known}")
    raise TargetError(f"unknown target {name!r}; this version compiles for: {known}")
