"""Opening of the accelerator that an artifact is for.

A package offers a kind of accelerator by an entry point of the group `picompile_runtime.devices`: its name is the
kind's, its value an `AcceleratorKind`. Ours are found in the same way, so that only the needed one is imported.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from picompile_runtime.devices.accelerator import Accelerator, AcceleratorKind
from picompile_runtime.errors import ArtifactError

if TYPE_CHECKING:
    from picompile_runtime.artifact.reader import Artifact

GROUP = "picompile_runtime.devices"
_OURS = (
    EntryPoint("cpu", "picompile_runtime.devices.cpu.partition:KIND", GROUP),
    EntryPoint("cuda", "picompile_runtime.devices.cuda.open:KIND", GROUP),
)


def accelerator_kind(artifact: Artifact) -> AcceleratorKind:
    """Return the kind of accelerator that `artifact` is for.

    Raises ArtifactError if it has no code for one, or no package here knows the kind.
    """
    code = artifact.manifest.accelerator
    if code is None:
        raise ArtifactError(f"{artifact.folder}: has calls for an accelerator, and no code for one; compile it again")
    for point in (*_OURS, *entry_points(group=GROUP)):
        if point.name == code.kind:
            kind = point.load()
            if not isinstance(kind, AcceleratorKind):
                raise ArtifactError(f"{point.value} is no kind of accelerators")
            return kind
    raise ArtifactError(
        f"{artifact.folder}: is for an accelerator of the kind {code.kind!r}, which no package here opens"
    )


def open_accelerator(artifact: Artifact, threads: int) -> Accelerator:
    """Open and return the accelerator that `artifact` is for; one that is part of the CPU runs `threads` threads.

    Raises MachineError if this machine has none of its kind, ArtifactError if the artifact has no code for it.
    """
    return accelerator_kind(artifact).open(artifact, threads)


def split_threads(artifact: Artifact, threads: int) -> tuple[int, int]:
    """Return how many of the CPU's threads host and accelerator get. A GPU gets none."""
    has_code = artifact.program.has_accelerator and artifact.manifest.accelerator is not None
    if not has_code or not accelerator_kind(artifact).on_cpu:
        return threads, 0
    return max(1, threads // 2), max(1, threads - threads // 2)
