"""The machines that models are planned and compiled for: a table, one row a machine, and this machine as measured.

`targets` has the table and looks rows up. `measured` adds the target `local`, this machine, with the figures that `gpu`
and `host` measure. `targets` imports none of the other three.
"""

from picompile.machine.targets import (
    HOST_EFFICIENCY,
    LAUNCH_READS_S,
    LAUNCH_S,
    LOCAL,
    NATIVE,
    SYNC_S,
    TARGETS,
    Target,
    find_compiled_targets,
    find_native_target,
    find_row,
    gpu_of,
    may_have_gpu,
    native_target,
    pcie_bytes_per_s,
    target_names,
)

__all__ = [
    "HOST_EFFICIENCY",
    "LAUNCH_READS_S",
    "LAUNCH_S",
    "LOCAL",
    "NATIVE",
    "SYNC_S",
    "TARGETS",
    "Target",
    "find_compiled_targets",
    "find_native_target",
    "find_row",
    "gpu_of",
    "may_have_gpu",
    "native_target",
    "pcie_bytes_per_s",
    "target_names",
]
