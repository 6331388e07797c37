"""Opening of the GPU for an artifact, with a check that host and GPU see each other's writes while a kernel runs.

A hybrid step relies on that: host and GPU meet at flags in pinned memory in the middle of one CUDA graph. Linux allows
it, but not every system does: under WSL2 a kernel may see what the host writes only after the kernel has ended.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import UPLOAD_OP
from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.accelerator import AcceleratorKind, ArgumentView
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda.accelerator import BoundGraphs, CudaAccelerator
from picompile_runtime.devices.cuda.module import CudaImages, check_arguments, read_images
from picompile_runtime.devices.memory import Tensor
from picompile_runtime.errors import ArtifactError, MachineError
from picompile_runtime.verified_files import is_remembered, remember

KERNEL = "ping_pong"
# More than the GPU's own timeout, so that the GPU has ended by then.
_PATIENCE_S = 2.0
_ROUNDS_AT_LOAD = 100
# Tried twice: a machine may stand still for a moment and pass the second time.
_ATTEMPTS = 2
_MOST_ROUNDS = 2**20
_WORDS = 1024
# The kernel's arguments and their sizes in words; each begins at a cache line.
_ARGUMENTS = {"step": 16, "ping": 16, "pong": 16, "abandoned": 16, "sent": _WORDS, "echoed": _WORDS}


@dataclass(frozen=True)
class RoundTrips:
    """Times of round trips between host and GPU: how many there were, and their median and 99th percentile in seconds.

    `start_s` is how long the call took that started the GPU.
    """

    rounds: int
    p50_s: float
    p99_s: float
    start_s: float


def ping_pong(
    gpu: CudaAccelerator,
    library: HostLibrary,
    rounds: int,
    behind: Sequence[tuple[str, Sequence[ArgumentView]]] = (),
) -> RoundTrips:
    """Transfer 32 words and two flags between host and GPU `rounds` times, through memory as the engine uses it.

    Args:
        gpu: the GPU, with an image that has the kernel `ping_pong`.
        library: a `host.so` of the same version.
        rounds: 1 to 2**20.
        behind: calls that the GPU makes after it, in the same graph, as for `CudaAccelerator.bind`.

    Returns:
        The times of the round trips.

    Raises:
        MachineError: one side does not see what the other writes, or sees the flag before what it announces.
        KernelError: a call of the driver failed.
    """
    if not 1 <= rounds <= _MOST_ROUNDS:
        raise ValueError(f"rounds must be from 1 to {_MOST_ROUNDS}, not {rounds}")
    memory, array = gpu.share(4 * sum(_ARGUMENTS.values()), "memory for round trips of flags")
    spans = dict(zip(_ARGUMENTS, pairwise([0, *accumulate(_ARGUMENTS.values())]), strict=True))
    parts = {name: array.view(np.int32)[start:stop] for name, (start, stop) in spans.items()}
    views = [ArgumentView(memory, Tensor("int32", (stop - start,), 4 * start)) for start, stop in spans.values()]
    bound = gpu.bind([(KERNEL, views), *behind])
    for _ in range(_ATTEMPTS):
        array[:] = 0
        parts["step"][0] = rounds
        start_s, (failed, seconds) = _exchange(gpu, bound, library, parts, rounds)
        if not failed:
            p50_s, p99_s = (float(value) for value in np.percentile(seconds, (50, 99)))
            return RoundTrips(rounds, p50_s, p99_s, start_s)
    raise MachineError(_reason(gpu.name, failed, rounds, parts))


def _exchange(
    gpu: CudaAccelerator,
    bound: BoundGraphs,
    library: HostLibrary,
    parts: Mapping[str, NDArray[np.int32]],
    rounds: int,
) -> tuple[float, tuple[int, NDArray[np.float64]]]:
    """Run round trips. Return how long the start took in s, and the result of `HostLibrary.ping_pong`."""
    begin = time.perf_counter()
    gpu.start(bound)
    start_s = time.perf_counter() - begin
    try:
        return start_s, library.ping_pong([parts[name] for name in list(_ARGUMENTS)[1:]], rounds, _PATIENCE_S)
    except BaseException:
        parts["abandoned"][0] = 1
        raise
    finally:
        gpu.wait()


def check_once(gpu: CudaAccelerator, library: HostLibrary) -> None:
    """Raise MachineError if host and GPU cannot meet at flags. A machine that passes is not checked again.

    Artifacts that were compiled before the kernel existed are not checked.
    """
    # Not from `platform`, which starts a process to find out the processor.
    facts = (KERNEL, gpu.name, gpu.driver_version, *os.uname()[:4])
    if not gpu.has_kernel(KERNEL) or not library.has_ping_pong or is_remembered(*facts):
        return
    ping_pong(gpu, library, _ROUNDS_AT_LOAD)
    remember(*facts)


def _reason(name: str, failed: int, rounds: int, parts: Mapping[str, NDArray[np.int32]]) -> str:
    number, answered, held = abs(failed), int(parts["pong"][0]), int(parts["abandoned"][4])
    if failed < 0:
        what = "the host saw the GPU's flag before the words that it announces"
    elif answered >= number:
        what = "the GPU answered, and the host did not see it"
    else:
        what = f"the GPU did not see the host's flag, in which it saw {held}"
    is_wsl = "microsoft" in platform.release().lower()
    hint = "this is WSL2: run on Linux itself" if is_wsl else "close what else uses the GPU and try again"
    return (
        f"{name}: {what} while a kernel ran (round trip {number} of {rounds}, tried twice), so GPU and CPU cannot "
        f"share a step; {hint}, or compile the model for the CPU (--target cpu)"
    )


def open_cuda_accelerator(artifact: Artifact) -> CudaAccelerator:
    """Open and return the GPU for an artifact.

    Raises:
        MachineError: no GPU here can run the artifact's code, or host and GPU cannot meet within a step, as the program
            needs.
        ArtifactError: the artifact has no code for a GPU.
    """
    images, host = read_cuda_images(artifact), artifact.load_code()
    _check_copies(artifact, images)
    gpu = CudaAccelerator(images, host=host)
    try:
        if artifact.program.waiting_kernels:
            check_once(gpu, host)
    except BaseException:
        gpu.close()
        raise
    return gpu


def check_images(artifact: Artifact) -> None:
    """Raise ArtifactError if the GPU code lacks a kernel that the program calls. This needs no GPU."""
    images, program = read_cuda_images(artifact), artifact.program
    _check_copies(artifact, images)
    for call in (call for name in program.functions for call in program.calls(name, "accelerator")):
        if call.kernel not in images.kernels and call.kernel not in images.copies:
            raise ArtifactError(f"{artifact.folder}: the GPU code has no kernel {call.kernel}; compile the model again")
        for launch in images.kernels.get(call.kernel, ()):
            check_arguments(launch, len(call.args), call.kernel)


def _check_copies(artifact: Artifact, images: CudaImages) -> None:
    """Raise ArtifactError if a kernel that is a copy beside the launches is called as if it were one of these."""
    for call in (call for name in artifact.program.functions for call in artifact.program.calls(name, "accelerator")):
        if (call.kernel in images.copies) != (call.op == UPLOAD_OP):
            copies = f"only copies are called as {UPLOAD_OP}, and all of them"
            raise ArtifactError(f"{artifact.folder}: {call.kernel} is called as {call.op}; {copies}")


def read_cuda_images(artifact: Artifact) -> CudaImages:
    """Return an artifact's GPU code. Raises ArtifactError if it has none, or a wrong one."""
    code = artifact.manifest.accelerator
    if code is None or not {"launches", "cubin", "ptx"} <= code.files.keys():
        raise ArtifactError(f"{artifact.folder}: has no code for a GPU; compile it again")
    text, cubin, ptx = (artifact.texts[code.files[role]] for role in ("launches", "cubin", "ptx"))
    images = read_images(text, cubin, ptx, str(artifact.folder / code.files["launches"]))
    if images.sm != code.sm:
        raise ArtifactError(f"{artifact.folder}: manifest.json and {code.files['launches']} disagree on sm")
    return images


KIND = AcceleratorKind(
    "cuda",
    lambda artifact, threads: open_cuda_accelerator(artifact),
    lambda artifact: read_cuda_images(artifact).interfaces,
    check_images,
)
