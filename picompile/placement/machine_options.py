"""The machine that is planned for: a row of the targets, or this machine, and what the user says of it."""

from dataclasses import dataclass

from picompile.errors import UsageError
from picompile.placement.machine import Machine, machine_of
from picompile.sizes import parse_bandwidth, parse_budget, parse_bytes
from picompile.targets import LOCAL, TARGETS, Target, find_target

# Of the memory that a GPU is sold with, its driver keeps 1 to 4 %.
_USABLE = 0.96
# What a GPU's name does not say: a common desktop, with two channels of DDR4-3200, 8 bytes wide each.
_HOST_BYTES = 64 * 2**30
_HOST_BYTES_PER_S = 2 * 3200e6 * 8


@dataclass(frozen=True)
class MachineOptions:
    """What the user said: sizes and bandwidths as text, None for what was left out."""

    target: str
    vram_budget: str | None = None
    host_memory: str | None = None
    host_bandwidth: str | None = None


@dataclass(frozen=True)
class PlanMachine:
    """A machine with its budgets, margins not taken off. `description` and `host_source` are for people.

    `warning` says what is odd about the budgets.
    """

    machine: Machine
    target: Target
    host_source: str
    warning: str | None = None


def check_machine_options(options: MachineOptions) -> None:
    """Raises `UsageError` or `TargetError` for what can be known to be wrong without measuring anything."""
    if options.target != LOCAL:
        find_target(options.target)
    row = TARGETS.get(options.target)
    if options.vram_budget is not None:
        if row is not None and not row.vram_bytes:
            raise UsageError(f"--vram-budget: the target {row.name} has no GPU; leave it out, or name another --target")
        parse_budget(options.vram_budget, 0, "--vram-budget")
    if options.host_memory is not None:
        _host_budget(options.host_memory, 0)
    if options.host_bandwidth is not None:
        parse_bandwidth(options.host_bandwidth, "--host-bandwidth")


def find_machine(options: MachineOptions) -> PlanMachine:
    """The machine that is planned for; `local` and `cpu` are measured where they have not been. Raises `UsageError`."""
    if options.target in TARGETS and TARGETS[options.target].vram_bytes:
        return _row(TARGETS[options.target], options)
    return _this_machine(options)


def _row(target: Target, options: MachineOptions) -> PlanMachine:
    usable_bytes = int(target.vram_bytes * _USABLE)
    assumed = []
    if options.host_memory is None:
        host_bytes = _HOST_BYTES
        assumed.append("size assumed")
    else:
        host_bytes = _host_budget(options.host_memory, None)
    if options.host_bandwidth is None:
        host_bytes_per_s = _HOST_BYTES_PER_S
        assumed.append("bandwidth assumed: dual-channel DDR4")
    else:
        host_bytes_per_s = parse_bandwidth(options.host_bandwidth, "--host-bandwidth")
    source = ", ".join(assumed) or "as given"
    machine, warning = _with_gpu(target, options, usable_bytes, (host_bytes, host_bytes_per_s))
    return PlanMachine(machine, target, source, warning)


def _this_machine(options: MachineOptions) -> PlanMachine:
    """`local`, or `cpu`, which is this machine without its GPU."""
    from picompile.measure import host_memory, measure_local

    available_bytes = host_memory()[1]
    host_bytes = available_bytes
    if options.host_memory is not None:
        host_bytes = _host_budget(options.host_memory, available_bytes)
    measured = measure_local()
    target = TARGETS.get(options.target, measured.target)
    host_bytes_per_s = measured.host.bytes_per_s
    if options.host_bandwidth is not None:
        host_bytes_per_s = parse_bandwidth(options.host_bandwidth, "--host-bandwidth")
    said = [
        "size as available" if options.host_memory is None else "",
        "bandwidth as measured" if options.host_bandwidth is None else "",
    ]
    source = ", ".join(text for text in said if text) or "as given"
    host = (host_bytes, host_bytes_per_s)
    if not target.vram_bytes or measured.speed is None:
        if options.vram_budget is not None:
            raise UsageError(f"--vram-budget: this machine has no GPU that can be used ({measured.no_gpu})")
        return PlanMachine(machine_of(target, 0, *host), target, source)
    machine, warning = _with_gpu(target, options, measured.speed.free_bytes, host)
    return PlanMachine(machine, target, source, warning)


def _with_gpu(
    target: Target, options: MachineOptions, usable_bytes: int, host: tuple[int, float]
) -> tuple[Machine, str | None]:
    gpu_bytes = parse_budget(options.vram_budget or "auto", usable_bytes, "--vram-budget")
    warning = None
    if gpu_bytes > usable_bytes:
        warning = (
            f"--vram-budget {options.vram_budget} is more than {usable_bytes / 2**30:.1f} GiB, which is what programs "
            f"get of {target.description}'s memory"
        )
    return machine_of(target, gpu_bytes, *host), warning


def _host_budget(text: str, available_bytes: int | None) -> int:
    if available_bytes is None:
        return _HOST_BYTES if text.strip().lower() == "auto" else parse_bytes(text, "--host-memory")
    return parse_budget(text, available_bytes, "--host-memory")
