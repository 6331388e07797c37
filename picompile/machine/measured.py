"""This machine as a target: measured once, and kept in the user's cache folder as JSON.

A file counts as missing if it is damaged, which the sha256 of its content shows, or if it is of another version or
another machine. A file that cannot be written only costs the time to measure again.
"""

import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from time import time
from typing import Any

from picompile.machine.gpu import GpuName, GpuSpeed, find_gpu, measure_gpu
from picompile.machine.host import Host, cpu_name, host_memory, measure_host
from picompile.machine.kept import cache_folder, keep, read_kept
from picompile.machine.targets import HOST_DENSE_EFFICIENCY, LAUNCH_READS_S, LOCAL, TARGETS, Target, find_row
from picompile_runtime import ArtifactError
from picompile_runtime.artifact.fields import Fields
from picompile_runtime.devices.cuda.driver import CudaError
from picompile_runtime.devices.machine import default_threads

# Increased when something is measured in another way.
_SCHEMA = 2


def cache_file() -> Path:
    """Return the file that keeps them. Raise `RuntimeError` if this user has no home folder."""
    return cache_folder() / "local.json"


def load(machine: "MeasuredMachine", no_gpu: str) -> "LocalMachine | None":
    """Return the measurements kept of `machine`, None without any; `no_gpu` says why it has no GPU now."""
    with suppress(OSError, RuntimeError, ArtifactError):
        fields = read_kept(cache_file(), {"schema": _SCHEMA, "machine": asdict(machine)})
        host = fields.object("host")
        speed = None if machine.gpu is None else _speed(fields.object("speed"))
        share = _positive(host, "scattered_share")
        if share > 1:
            raise host.wrong("scattered_share", "a share")
        memory = Host(host.integer("bytes", least=1), _positive(host, "bytes_per_s"), share)
        return LocalMachine(
            machine, host=memory, speed=speed, no_gpu=no_gpu, measured_at_s=_positive(fields, "measured_at_s")
        )
    return None


def _speed(fields: Fields) -> GpuSpeed:
    free_bytes, *speeds = (each.name for each in dataclass_fields(GpuSpeed))
    return GpuSpeed(fields.integer(free_bytes), *(_positive(fields, name) for name in speeds))


def _positive(fields: Fields, key: str) -> float:
    value = fields.data.get(key)
    # Python's JSON may hold NaN and Infinity.
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < 1e300:
        raise fields.wrong(key, "a positive number")
    return float(value)


def store(measured: "LocalMachine") -> None:
    """Replace the file by `measured`; another process that reads it meanwhile sees the old or the new content."""
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "measured_at_s": measured.measured_at_s,
        "machine": asdict(measured.machine),
        "host": asdict(measured.host),
        "speed": None if measured.speed is None else asdict(measured.speed),
    }
    with suppress(RuntimeError):
        keep(cache_file(), content)


@dataclass(frozen=True)
class MeasuredMachine:
    """The machine and threads that a measurement is of; with others it is made again."""

    cpu: str
    threads: int
    memory_bytes: int
    gpu: GpuName | None


@dataclass(frozen=True)
class LocalMachine:
    """This machine, measured `measured_at_s` seconds after 1970.

    `speed` is None if there is no GPU that can be used; `no_gpu` then says why.
    """

    machine: MeasuredMachine
    host: Host
    speed: GpuSpeed | None
    no_gpu: str
    measured_at_s: float

    @property
    def target(self) -> Target:
        """The row `local` of the targets.

        The host's efficiency is the share of its bandwidth at which scattered rows are read; whole matrices are read at
        least as well, and at least at the typical share. A launch is the gap that
        was measured, and the table's estimate of what a kernel waits for beside it. The rate of tensor cores is the
        table's, too.
        """
        rows = [row for row in TARGETS.values() if row.vram_bytes]
        gpu, speed, cpu = self.machine.gpu, self.speed, TARGETS["cpu"]
        dense_share = max(self.host.scattered_share, HOST_DENSE_EFFICIENCY)
        if gpu is None or speed is None:
            description = f"this machine: {self.machine.cpu}, no GPU"
            return Target(
                LOCAL,
                description,
                platform.machine(),
                cpu.features,
                source="measured",
                host_efficiency=self.host.scattered_share,
                host_dense_efficiency=dense_share,
            )
        return Target(
            LOCAL,
            f"this machine: {self.machine.cpu}, {gpu.name}",
            platform.machine(),
            cpu.features,
            architecture=f"sm_{gpu.sm}",
            vram_bytes=gpu.total_bytes,
            gpu_bytes_per_s=speed.copy_bytes_per_s,
            # A plan has one figure for both directions.
            pcie_bytes_per_s=min(speed.down_bytes_per_s, speed.up_bytes_per_s),
            sync_s=speed.exchange_s,
            launch_s=speed.launch_gap_s + LAUNCH_READS_S,
            tensor_flops_per_s=next((row.tensor_flops_per_s for row in rows if _is_named(row, gpu.name)), 0.0),
            source="measured",
            host_efficiency=self.host.scattered_share,
            host_dense_efficiency=dense_share,
        )


def _is_named(row: Target, name: str) -> bool:
    """Return whether a driver calls the GPU of a row of the table by `name`, as `NVIDIA A100-SXM4-80GB`."""
    kind, _, form = row.description.partition(" ")
    if kind == "GeForce":
        return name.endswith(row.description)
    return bool(form) and kind in name.replace("-", " ").split()


def find_target(name: str) -> Target:
    """Return the target `name`: `local` is this machine, measured unless it was before; others are rows of the table.

    Raises `TargetError` for a name that is not known.
    """
    return measure_local().target if name == LOCAL else find_row(name)


def measure_local(*, anew: bool = False) -> LocalMachine:
    """Return this machine's measurements, from the cache unless `anew`. Measuring takes a second or two."""
    machine, no_gpu = _machine()
    if not anew and (found := load(machine, no_gpu)) is not None:
        return found
    speed = None
    if machine.gpu is not None:
        try:
            speed = measure_gpu()
        except CudaError as error:
            no_gpu = f"{machine.gpu.name}: {error}"
    measured = LocalMachine(
        machine, host=measure_host(machine.threads), speed=speed, no_gpu=no_gpu, measured_at_s=time()
    )
    if speed is not None or machine.gpu is None:
        # Not stored if the GPU could not be measured: if another program fills it, it may be free the next time.
        store(measured)
    return measured


def with_faster_host(local: LocalMachine) -> LocalMachine:
    """Return `local`, with the host as measured now if that was faster, and keep it then. Takes half a second.

    Other programs make memory slower and never faster, so of several measurements the fastest is right.
    """
    host = measure_host(local.machine.threads)
    if host.bytes_per_s <= local.host.bytes_per_s:
        return local
    faster = replace(local, host=host, measured_at_s=time())
    if faster.speed is not None or faster.machine.gpu is None:
        store(faster)
    return faster


def cached_local() -> LocalMachine | None:
    """Return the cached figures of this machine, None if it was not measured."""
    machine, no_gpu = _machine()
    return load(machine, no_gpu)


def _machine() -> tuple[MeasuredMachine, str]:
    """Return this machine, and why it has no GPU if it has none."""
    gpu, no_gpu = None, ""
    try:
        gpu = find_gpu()
    except CudaError as error:
        no_gpu = str(error)
    return MeasuredMachine(cpu_name(), default_threads(), host_memory()[0], gpu), no_gpu
