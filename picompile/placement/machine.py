"""A machine as the planner sees it: how much memory accelerator and host have, and how fast they read it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from picompile.errors import UsageError
from picompile.machine.targets import HOST_EFFICIENCY, LOCAL, Target, find_planned
from picompile.options import Option, option
from picompile.quantities import parse_bandwidth, parse_budget, parse_bytes

if TYPE_CHECKING:
    from picompile.machine.measured import LocalMachine

# The share of a GPU's bandwidth that kernels reach. It is an assumption: copies reach some 90 % of the datasheet's
# figure, and matrix-vector products of a few MB less than copies. A target has the host's shares.
GPU_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Machine:
    """One GPU (or none) and one host.

    `gpu_bytes` and `host_bytes` are what may be filled, margins already taken off; 0 `gpu_bytes` is a machine without
    a GPU. Bandwidths are those of datasheets, or of a copy; `gpu_efficiency` and `host_efficiency` are the shares that
    kernels reach of them. `sync_s` is one transfer to the GPU and back: a vector down, then a vector up, with the two
    kernels that send and receive. `launch_s` is what every launch on the GPU costs beside the bytes that it reads: the
    gap in front of it, and the time until its reads are under way and after the last of them. `host_dense_efficiency`
    takes the place of `host_efficiency` for models whose neurons are all computed; None if it is the same.
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
    host_dense_efficiency: float | None = None

    @property
    def dense(self) -> "Machine":
        """The machine as a model has it whose neurons are all computed."""
        return self if self.host_dense_efficiency is None else replace(self, host_efficiency=self.host_dense_efficiency)

    @property
    def gpu_read_bytes_per_s(self) -> float:
        """Return the bytes per second at which kernels on the GPU read weights."""
        return self.gpu_bytes_per_s * self.gpu_efficiency

    @property
    def host_read_bytes_per_s(self) -> float:
        """Return the bytes per second at which kernels on the host read weights."""
        return self.host_bytes_per_s * self.host_efficiency

    def crossing_s(self, crossing_bytes: float) -> float:
        """Return the seconds of one transfer of `crossing_bytes`, with the kernels that send and receive."""
        return self.sync_s + (crossing_bytes / self.pcie_bytes_per_s if self.pcie_bytes_per_s else 0.0)


def machine_of(target: Target, gpu_bytes: int, host_bytes: int, host_bytes_per_s: float) -> Machine:
    """Return the machine of a target, with the memory that may be filled and a host, which a target does not have."""
    return Machine(
        gpu_bytes=gpu_bytes,
        gpu_bytes_per_s=target.gpu_bytes_per_s,
        host_bytes=host_bytes,
        host_bytes_per_s=host_bytes_per_s,
        pcie_bytes_per_s=target.pcie_bytes_per_s,
        sync_s=target.sync_s,
        launch_s=target.launch_s,
        host_efficiency=target.host_efficiency,
        host_dense_efficiency=target.host_dense_efficiency,
    )


# Of the memory that a GPU is sold with, its driver keeps 1 to 4 %.
_USABLE = 0.96
# What a GPU's name does not say: a common desktop, with two channels of DDR4-3200, 8 bytes wide each.
_HOST_BYTES = 64 * 2**30
_HOST_BYTES_PER_S = 2 * 3200e6 * 8


VRAM_BUDGET = Option(
    "GPU memory to use: 8GiB, 80%, or auto, which is what is free here, or 96 % of a GPU in the table.", metavar="SIZE"
)
HOST_MEMORY = Option(
    "Memory of the host. Default: 64GiB, or what is available if the target is this machine.", metavar="SIZE"
)
HOST_BANDWIDTH = Option(
    "Read bandwidth of the host's memory, as in 67.2GB/s. Default: 51.2 (two channels of DDR4-3200), or as measured "
    "if the target is this machine.",
    metavar="RATE",
)


@dataclass(frozen=True)
class MachineOptions:
    """The user's options about a machine: sizes and bandwidths as text, None for what was left out."""

    target: str = option(LOCAL, "The machine to plan for; see `picompile targets`.", metavar="NAME", common=True)
    vram_budget: str | None = replace(VRAM_BUDGET, common=True).field(None)
    host_memory: str | None = replace(HOST_MEMORY, common=True).field(None)
    host_bandwidth: str | None = replace(HOST_BANDWIDTH, common=True).field(None)


@dataclass(frozen=True)
class PlanMachine:
    """The machine to plan for, with its budgets, margins not taken off.

    `host_source` says where the host's figures are from, for people, and `shares_source` where the shares of its
    bandwidth are from that kernels reach. `warning` says what is odd about the budgets. `usable_bytes` is the most that
    programs get of the GPU's memory, 0 without a GPU.
    """

    machine: Machine
    target: Target
    host_source: str
    shares_source: str
    warning: str | None = None
    usable_bytes: int = 0


def check_machine_options(options: MachineOptions) -> None:
    """Raise `UsageError` or `TargetError` for options that are wrong; nothing is measured for that."""
    row = find_planned(options.target)
    if options.vram_budget is not None:
        if row is not None and not row.vram_bytes:
            raise UsageError(f"--vram-budget: the target {row.name} has no GPU; leave it out, or name another --target")
        parse_budget(options.vram_budget, 0, "--vram-budget")
    if options.host_memory is not None:
        _host_budget(options.host_memory, 0)
    if options.host_bandwidth is not None:
        parse_bandwidth(options.host_bandwidth, "--host-bandwidth")


_ASSUMED_HOST = ("size assumed", "bandwidth assumed: dual-channel DDR4")
_TYPICAL, _MEASURED = "typical shares", "as measured"


def find_machine(options: MachineOptions) -> PlanMachine:
    """Return the machine to plan for; this machine is measured where it has not been. Raise `UsageError`."""
    row = find_planned(options.target)
    if row is None or _host_is_here(row, options):
        from picompile.machine.measured import measure_local

        return measured_machine(options, measure_local())
    host, source = _host(options, None, _HOST_BYTES_PER_S, _ASSUMED_HOST)
    if not row.vram_bytes:
        return PlanMachine(machine_of(row, 0, *host), row, source, _TYPICAL)
    return _with_gpu(row, options, usable_bytes=int(row.vram_bytes * _USABLE), host=host, sources=(source, _TYPICAL))


def _host_is_here(row: Target, options: MachineOptions) -> bool:
    """Return whether the host of a row of the table is this machine, so that its measured figures hold.

    The host of `local` always is. Every other host is another machine, for which typical figures are assumed: that of
    a GPU in the table, and that of a processor whose bandwidth the user gives.
    """
    return not row.vram_bytes and options.host_bandwidth is None


def measured_machine(options: MachineOptions, measured: "LocalMachine") -> PlanMachine:
    """Return `local`, or `cpu`, which is this machine without its GPU, as it was measured. Raise `UsageError`."""
    from picompile.machine.host import host_memory

    notes = ("size as available", "bandwidth as measured")
    host, source = _host(options, host_memory()[1], measured.host.bytes_per_s, notes)
    target = replace(
        find_planned(options.target) or measured.target,
        host_efficiency=measured.target.host_efficiency,
        host_dense_efficiency=measured.target.host_dense_efficiency,
    )
    if target.vram_bytes and measured.speed is not None:
        sources = (source, _MEASURED)
        return _with_gpu(target, options, usable_bytes=measured.speed.free_bytes, host=host, sources=sources)
    if options.vram_budget is not None:
        raise UsageError(f"--vram-budget: this machine has no GPU that can be used ({measured.no_gpu})")
    return PlanMachine(machine_of(target, 0, *host), target, source, _MEASURED)


def _host(
    options: MachineOptions, available_bytes: int | None, bytes_per_s: float, notes: tuple[str, str]
) -> tuple[tuple[int, float], str]:
    """Return the host's (bytes, bytes per second), and a note on where they are from.

    A figure that the user does not give is `available_bytes` or `bytes_per_s`, and `notes` has what is said of it.
    """
    given = options.host_memory, options.host_bandwidth
    host_bytes = _host_budget("auto" if options.host_memory is None else options.host_memory, available_bytes)
    if options.host_bandwidth is not None:
        bytes_per_s = parse_bandwidth(options.host_bandwidth, "--host-bandwidth")
    source = ", ".join(note for note, value in zip(notes, given, strict=True) if value is None) or "as given"
    return (host_bytes, bytes_per_s), source


def _with_gpu(
    target: Target, options: MachineOptions, usable_bytes: int, host: tuple[int, float], sources: tuple[str, str]
) -> PlanMachine:
    gpu_bytes = parse_budget(options.vram_budget or "auto", usable_bytes, "--vram-budget")
    warning = None
    if gpu_bytes > usable_bytes:
        warning = (
            f"--vram-budget {options.vram_budget} is more than {usable_bytes / 2**30:.1f} GiB, which is what programs "
            f"get of {target.description}'s memory"
        )
    return PlanMachine(machine_of(target, gpu_bytes, *host), target, *sources, warning, usable_bytes)


def _host_budget(text: str, available_bytes: int | None) -> int:
    """Return the bytes that `--host-memory` means; `available_bytes` None is a host that is not this machine."""
    if available_bytes is None:
        return _HOST_BYTES if text.strip().lower() == "auto" else parse_bytes(text, "--host-memory")
    return parse_budget(text, available_bytes, "--host-memory")
