"""The hot device that an artifact is for."""

from __future__ import annotations

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.accelerator import Accelerator
from picompile_runtime.devices.cpu.partition import CpuPartition
from picompile_runtime.errors import ArtifactError


def open_accelerator(artifact: Artifact, threads: int) -> Accelerator:
    """Raises MachineError where this machine has none of its kind, ArtifactError where there is no code for it."""
    code = artifact.manifest.accelerator
    if code is None:
        raise ArtifactError(f"{artifact.folder}: has calls for a hot device, and no code for one; compile it again")
    if code.kind == "cpu":
        return CpuPartition(artifact.load_accelerator_code(), threads, artifact.program.waiting_kernels)
    from picompile_runtime.devices.cuda import open_cuda_accelerator

    return open_cuda_accelerator(artifact)


def split_threads(artifact: Artifact, threads: int) -> tuple[int, int]:
    """How many threads host and device take. A device that is a GPU takes none of the CPU's."""
    code = artifact.manifest.accelerator
    if code is None or code.kind != "cpu" or not artifact.program.has_accelerator:
        return threads, 0
    return max(1, threads // 2), max(1, threads - threads // 2)
