"""From an artifact to the GPU that runs its hot part."""

from __future__ import annotations

from picompile_runtime.artifact import Artifact
from picompile_runtime.cuda.device import CudaDevice
from picompile_runtime.cuda.images import read_images
from picompile_runtime.errors import ArtifactError


def open_cuda_device(artifact: Artifact) -> CudaDevice:
    """Raises MachineError where no GPU here can run the artifact's code, ArtifactError where it has none."""
    code = artifact.manifest.hot_device
    if code is None or code.kind != "cuda":
        raise ArtifactError(f"{artifact.folder}: has no code for a GPU; compile it again")
    text, cubin, ptx = (artifact.texts[code.files[role]] for role in ("launches", "cubin", "ptx"))
    images = read_images(text, cubin, ptx, str(artifact.folder / code.files["launches"]))
    if images.sm != code.sm:
        raise ArtifactError(f"{artifact.folder}: manifest.json and {code.files['launches']} disagree on sm")
    return CudaDevice(images)
