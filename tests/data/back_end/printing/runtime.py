"""The runtime's side of the back end: it knows what was printed, and runs none of it."""

from collections.abc import Mapping

from picompile_runtime.artifact.interfaces import KernelInterface, read_interfaces
from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.accelerator import Accelerator, AcceleratorKind
from picompile_runtime.errors import ArtifactError, MachineError


def open_printed(artifact: Artifact, threads: int) -> Accelerator:
    raise MachineError(f"{artifact.folder}: kernels that were printed do not run")


def interfaces(artifact: Artifact) -> Mapping[str, KernelInterface]:
    code = artifact.manifest.accelerator
    assert code is not None
    return read_interfaces(artifact.texts[code.files["interfaces"]], code.files["interfaces"])


def verify(artifact: Artifact) -> None:
    printed, program = interfaces(artifact), artifact.program
    called = {call.kernel for name in program.functions for call in program.calls(name, "accelerator")}
    if missing := called - set(printed):
        raise ArtifactError(f"{artifact.folder}: {min(missing)} was not printed")


KIND = AcceleratorKind("printing", open_printed, interfaces, verify)
