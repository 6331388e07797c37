"""This machine: its memory, its GPU and the way between them, measured and kept in the user's cache folder."""

from picompile.measure.cache import cache_file
from picompile.measure.gpu import GpuName, GpuSpeed
from picompile.measure.host import Host, cpu_name, host_memory
from picompile.measure.local import LocalMachine, Machine, cached_local, local_target, measure_local
from picompile_runtime.cuda.errors import CudaError

__all__ = [
    "CudaError",
    "GpuName",
    "GpuSpeed",
    "Host",
    "LocalMachine",
    "Machine",
    "cache_file",
    "cached_local",
    "cpu_name",
    "host_memory",
    "local_target",
    "measure_local",
]
