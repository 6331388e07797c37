"""Looking targets up in the table, by name and by what this machine's processor can run. Measures nothing."""

from picompile.errors import TargetError
from picompile.machine.table import LOCAL, NATIVE, TARGETS, Target


def target_names() -> tuple[str, ...]:
    """Return all names that `measured.find_target` knows."""
    return (*TARGETS, LOCAL)


def find_row(name: str) -> Target:
    """Return the row called `name`. Raises `TargetError` where the table has none, as for `local`."""
    if name not in TARGETS:
        raise TargetError(f"unknown target {name!r}; known are {', '.join(target_names())}")
    return TARGETS[name]


def find_compiled_targets(names: str) -> tuple[Target, ...]:
    """The rows that `names` lists, separated by commas, each once; `native` is the best that this machine has.

    Measures nothing. Raises `TargetError` for what this version makes no code for, and `MachineError` for `native` on a
    machine that it makes no code for.
    """
    return tuple(dict.fromkeys(_find_compiled(name) for name in names.split(",")))


def gpu_of(names: str) -> Target | None:
    """The row among those that `names` lists that has a GPU, if any. Raises `TargetError` for several."""
    rows = [target for target in find_compiled_targets(names) if target.sm is not None]
    if len(rows) > 1:
        raise TargetError(f"{names}: an artifact is for one GPU; compile the model for each of them")
    return rows[0] if rows else None


def _find_compiled(name: str) -> Target:
    if name == NATIVE:
        return native_target()
    compiled = ", ".join([*(target.name for target in TARGETS.values() if target.compiles), NATIVE])
    if name == LOCAL or (name in TARGETS and not TARGETS[name].compiles):
        what = f"this version plans for target {name!r} (picompile plan), but compiles only for: {compiled}"
        raise TargetError(f"{what}; this machine's processor is {NATIVE}" if name == LOCAL else what)
    if name not in TARGETS:
        raise TargetError(f"unknown target {name!r}; known are {', '.join((*target_names(), NATIVE))}")
    return TARGETS[name]


def native_target() -> Target:
    """The row of the best instruction set that this machine has. Raises `MachineError` where it has none of them."""
    found = find_native_target()
    if found is not None:
        return found
    import platform

    from picompile_runtime.errors import MachineError

    known = "; ".join(f"{row.machine} with {', '.join(row.features)}" for row in _single_rows())
    raise MachineError(f"no code can be made for this machine's processor, {platform.machine()}; known are {known}")


def find_native_target() -> Target | None:
    """The row of the best instruction set that this machine has, if it has any."""
    from picompile_runtime.devices.machine import is_machine, missing_features

    rows = (row for row in reversed(_single_rows()) if is_machine(row.machine))
    return next((row for row in rows if not missing_features(row.features)), None)


def _single_rows() -> list[Target]:
    """One row for each instruction set; of those of one machine, the best comes last."""
    return [row for row in TARGETS.values() if len(row.isas) == 1 and row.sm is None]
