"""Opens the accelerator that an artifact is for."""

from __future__ import annotations

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.accelerator import Accelerator
from picompile_runtime.devices.cpu.partition import CpuPartition
from picompile_runtime.errors import ArtifactError


def open_accelerator(artifact: Artifact, threads: int) -> Accelerator:
    """Open and return the accelerator that `artifact` is for; a CPU partition runs `threads` threads.

    Raises MachineError if this machine has none of its kind, ArtifactError if the artifact has no code for it.
    """
    code = artifact.manifest.accelerator
    if code is None:
        raise ArtifactError(f"{artifact.folder}: has calls for an accelerator, and no code for one; compile it again")
    if code.kind == "cpu":
        return CpuPartition(artifact.load_accelerator_code(), threads, artifact.program.waiting_kernels)
    from picompile_runtime.devices.cuda import open_cuda_accelerator

    return open_cuda_accelerator(artifact)


def split_threads(artifact: Artifact, threads: int) -> tuple[int, int]:
    """Return how many of the CPU's threads host and accelerator get. A GPU gets none."""
    code = artifact.manifest.accelerator
    if code is None or code.kind != "cpu" or not artifact.program.has_accelerator:
        return threads, 0
    return max(1, threads // 2), max(1, threads - threads // 2)
