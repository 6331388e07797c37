"""This machine as a target: measured once, and again when it is not the same machine any more."""

import platform
from dataclasses import dataclass
from time import time

from picompile.measure import cache
from picompile.measure.gpu import GpuName, GpuSpeed, find_gpu, measure_gpu
from picompile.measure.host import Host, cpu_name, host_memory, measure_host
from picompile.targets import LAUNCH_S, LOCAL, TARGETS, Target
from picompile_runtime.cuda.errors import CudaError


@dataclass(frozen=True)
class Machine:
    """What a measurement is about; another machine, or other threads, are measured anew."""

    cpu: str
    threads: int
    memory_bytes: int
    gpu: GpuName | None


@dataclass(frozen=True)
class LocalMachine:
    """This machine, measured `measured_at_s` seconds after 1970.

    `speed` is None where there is no GPU that can be used, and `no_gpu` then says why.
    """

    machine: Machine
    host: Host
    speed: GpuSpeed | None
    no_gpu: str
    measured_at_s: float

    @property
    def target(self) -> Target:
        """The row `local` of the targets. Its `launch_s` is not measured, but that of the table."""
        gpu, speed, cpu = self.machine.gpu, self.speed, TARGETS["cpu"]
        if gpu is None or speed is None:
            description = f"this machine: {self.machine.cpu}, no GPU"
            return Target(LOCAL, description, platform.machine(), cpu.features, source="measured")
        return Target(
            LOCAL,
            f"this machine: {self.machine.cpu}, {gpu.name}",
            platform.machine(),
            cpu.features,
            sm=gpu.sm,
            vram_bytes=gpu.total_bytes,
            gpu_bytes_per_s=speed.copy_bytes_per_s,
            # A plan does not say which way it copies.
            pcie_bytes_per_s=min(speed.down_bytes_per_s, speed.up_bytes_per_s),
            sync_s=speed.exchange_s,
            launch_s=LAUNCH_S,
            source="measured",
        )


def local_target() -> Target:
    """This machine as a target, measured unless the cache has it."""
    return measure_local().target


def measure_local(*, anew: bool = False) -> LocalMachine:
    """This machine, from the cache unless `anew` or another machine is in it. Measuring takes a second or two."""
    machine, no_gpu = _machine()
    if not anew and (found := cache.load(machine, no_gpu)) is not None:
        return found
    speed = None
    if machine.gpu is not None:
        try:
            speed = measure_gpu()
        except CudaError as error:
            no_gpu = f"{machine.gpu.name}: {error}"
    measured = LocalMachine(machine, measure_host(machine.threads), speed, no_gpu, time())
    if speed is not None or machine.gpu is None:
        # A GPU that another program has filled may be free the next time.
        cache.store(measured)
    return measured


def cached_local() -> LocalMachine | None:
    """What is known of this machine without measuring it."""
    machine, no_gpu = _machine()
    return cache.load(machine, no_gpu)


def _machine() -> tuple[Machine, str]:
    """This machine, and why it has no GPU if it has none."""
    from picompile_runtime.machine import default_threads

    gpu, no_gpu = None, ""
    try:
        gpu = find_gpu()
    except CudaError as error:
        no_gpu = str(error)
    return Machine(cpu_name(), default_threads(), host_memory()[0], gpu), no_gpu
