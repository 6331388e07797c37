"""From an artifact to the GPU that runs its hot part."""

from __future__ import annotations

from picompile_runtime.artifact import Artifact
from picompile_runtime.cuda.device import CudaDevice
from picompile_runtime.cuda.images import DeviceImages, check_arguments, read_images
from picompile_runtime.cuda.ping_pong import check_once
from picompile_runtime.errors import ArtifactError


def open_cuda_device(artifact: Artifact) -> CudaDevice:
    """Open the GPU for an artifact.

    Raises MachineError where no GPU here can run the artifact's code, or cannot meet the host within a step where the
    program asks for that; ArtifactError where there is no code for a GPU.
    """
    device = CudaDevice(read_device_images(artifact))
    try:
        if artifact.program.waiting_kernels:
            check_once(device, artifact.load_code())
    except BaseException:
        device.close()
        raise
    return device


def check_images(artifact: Artifact) -> None:
    """Raises ArtifactError where the code for a GPU lacks a kernel that the program calls; needs no GPU."""
    images, program = read_device_images(artifact), artifact.program
    for call in (call for name in program.functions for call in program.calls(name, "device")):
        if call.kernel not in images.kernels:
            raise ArtifactError(f"{artifact.folder}: the GPU code has no kernel {call.kernel}; compile the model again")
        for launch in images.kernels[call.kernel]:
            check_arguments(launch, len(call.args), call.kernel)


def read_device_images(artifact: Artifact) -> DeviceImages:
    """Read the code for a GPU that an artifact has. Raises ArtifactError."""
    code = artifact.manifest.hot_device
    if code is None or code.kind != "cuda":
        raise ArtifactError(f"{artifact.folder}: has no code for a GPU; compile it again")
    text, cubin, ptx = (artifact.texts[code.files[role]] for role in ("launches", "cubin", "ptx"))
    images = read_images(text, cubin, ptx, str(artifact.folder / code.files["launches"]))
    if images.sm != code.sm:
        raise ArtifactError(f"{artifact.folder}: manifest.json and {code.files['launches']} disagree on sm")
    return images
