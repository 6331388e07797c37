"""A machine as the planner sees it: what each device holds, and how fast it reads."""

from dataclasses import dataclass

from picompile.errors import UsageError
from picompile.machine import LOCAL, TARGETS, Target, find_row
from picompile.quantities import parse_bandwidth, parse_budget, parse_bytes

# What kernels draw of a device's bandwidth, where nothing better is known. On the host f16 weights were read at 68 % of
# the streaming bandwidth measured in the same run (docs/benchmarks.md). On the GPU it is an assumption: copies reach
# some 90 % of the datasheet's figure, and matrix-vector products of a few MB less than copies.
HOST_EFFICIENCY = 0.7
GPU_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Machine:
    """One GPU (or none) and one host.

    `gpu_bytes` and `host_bytes` are what may be filled, margins already taken off; 0 `gpu_bytes` is a machine without
    a GPU. Bandwidths are those of datasheets, or of a copy; `gpu_efficiency` and `host_efficiency` are the shares that
    kernels draw of them. `sync_s` is one exchange between the devices: a vector down, a vector up, each waiting for the
    other, with the two kernels that send and receive. `launch_s` is what every launch on the GPU costs beside the bytes
    that it reads: the gap in front of it, and the time until its reads are under way and after the last of them.
    """

    gpu_bytes: int
    gpu_bytes_per_s: float
    host_bytes: int
    host_bytes_per_s: float
    pcie_bytes_per_s: float
    sync_s: float
    launch_s: float = 0.0
    gpu_efficiency: float = GPU_EFFICIENCY
    host_efficiency: float = HOST_EFFICIENCY

    @property
    def gpu_read_bytes_per_s(self) -> float:
        """What kernels on the GPU read weights at."""
        return self.gpu_bytes_per_s * self.gpu_efficiency

    @property
    def host_read_bytes_per_s(self) -> float:
        """What kernels on the host read weights at."""
        return self.host_bytes_per_s * self.host_efficiency

    def crossing_s(self, crossing_bytes: float) -> float:
        """Seconds of one exchange in which so many bytes cross, with what sends and what receives on the GPU."""
        return self.sync_s + (crossing_bytes / self.pcie_bytes_per_s if self.pcie_bytes_per_s else 0.0)


def machine_of(target: Target, gpu_bytes: int, host_bytes: int, host_bytes_per_s: float) -> Machine:
    """A row of the targets, with what may be filled of its GPU's memory, and the host that its name does not say."""
    return Machine(
        gpu_bytes=gpu_bytes,
        gpu_bytes_per_s=target.gpu_bytes_per_s,
        host_bytes=host_bytes,
        host_bytes_per_s=host_bytes_per_s,
        pcie_bytes_per_s=target.pcie_bytes_per_s,
        sync_s=target.sync_s,
        launch_s=target.launch_s,
    )


# The machine that is planned for: a row of the targets, or this machine, and what the user says of it.


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
        find_row(options.target)
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
    from picompile.machine.host import host_memory
    from picompile.machine.measured import measure_local

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
