"""A machine as the planner sees it: what each device holds, and how fast it reads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from picompile.targets import Target

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


def machine_of(target: "Target", gpu_bytes: int, host_bytes: int, host_bytes_per_s: float) -> Machine:
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
