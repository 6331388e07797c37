"""Whether host and GPU see each other's writes while a kernel runs, and how long a round trip takes.

A hybrid step rests on that: both sides meet at flags in pinned memory in the middle of one CUDA graph. It holds on
Linux and not on every system: under WSL2 a kernel may see what the host writes only when it has ended.
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

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.cuda.accelerator import BoundGraphs, CudaAccelerator
from picompile_runtime.devices.cuda.module import CudaImages, check_arguments, read_images
from picompile_runtime.devices.memory import Tensor
from picompile_runtime.errors import ArtifactError, MachineError
from picompile_runtime.verified_files import is_remembered, remember

KERNEL = "ping_pong"
# More than the GPU has, so that it has ended by then.
_PATIENCE_S = 2.0
_ROUNDS_AT_LOAD = 100
# A machine that stands still for a moment is no machine that cannot do it.
_ATTEMPTS = 2
_MOST_ROUNDS = 2**20
_WORDS = 1024
# Arguments of the kernel after `step`, with their words; each begins at a cache line.
_ARGUMENTS = {"step": 16, "ping": 16, "pong": 16, "abandoned": 16, "sent": _WORDS, "echoed": _WORDS}


@dataclass(frozen=True)
class RoundTrips:
    """The round trips that were made: how many, and the seconds that half and 99 % of them did not exceed.

    `start_s`: the seconds until the host was back from starting the GPU, which waited for it by then.
    """

    rounds: int
    p50_s: float
    p99_s: float
    start_s: float


def ping_pong(
    device: CudaAccelerator,
    library: HostLibrary,
    rounds: int,
    behind: Sequence[tuple[str, Sequence[ArgumentView]]] = (),
) -> RoundTrips:
    """Let host and GPU exchange 32 words and two flags `rounds` times, through memory as the engine uses it.

    Args:
        device: the GPU, with an image that has the kernel `ping_pong`.
        library: a `host.so` of the same version.
        rounds: 1 to 2**20.
        behind: calls that the GPU makes after it, in the same graph, as for `CudaDevice.bind`.

    Raises:
        MachineError: one side does not see what the other writes, or sees the flag before what it announces.
        KernelError: a call of the driver failed.
    """
    if not 1 <= rounds <= _MOST_ROUNDS:
        raise ValueError(f"rounds must be from 1 to {_MOST_ROUNDS}, not {rounds}")
    memory, array = device.share(4 * sum(_ARGUMENTS.values()), "the exchange of flags")
    spans = dict(zip(_ARGUMENTS, pairwise([0, *accumulate(_ARGUMENTS.values())]), strict=True))
    parts = {name: array.view(np.int32)[start:stop] for name, (start, stop) in spans.items()}
    views = [ArgumentView(memory, Tensor("int32", (stop - start,), 4 * start)) for start, stop in spans.values()]
    bound = device.bind([(KERNEL, views), *behind])
    for _ in range(_ATTEMPTS):
        array[:] = 0
        parts["step"][0] = rounds
        start_s, (failed, seconds) = _exchange(device, bound, library, parts, rounds)
        if not failed:
            p50_s, p99_s = (float(value) for value in np.percentile(seconds, (50, 99)))
            return RoundTrips(rounds, p50_s, p99_s, start_s)
    raise MachineError(_reason(device.name, failed, rounds, parts))


def _exchange(
    device: CudaAccelerator,
    bound: BoundGraphs,
    library: HostLibrary,
    parts: Mapping[str, NDArray[np.int32]],
    rounds: int,
) -> tuple[float, tuple[int, NDArray[np.float64]]]:
    """Return how long the start took, and what `HostLibrary.ping_pong` returns, once the GPU has ended."""
    begin = time.perf_counter()
    device.start(bound)
    start_s = time.perf_counter() - begin
    try:
        return start_s, library.ping_pong([parts[name] for name in list(_ARGUMENTS)[1:]], rounds, _PATIENCE_S)
    except BaseException:
        parts["abandoned"][0] = 1
        raise
    finally:
        device.wait()


def check_once(device: CudaAccelerator, library: HostLibrary) -> None:
    """Raise MachineError where host and GPU cannot meet at flags. A machine where they can is asked once.

    Artifacts that were compiled before there was the kernel are not asked.
    """
    # Not of `platform`, which starts a process to ask for the processor.
    facts = (KERNEL, device.name, device.driver_version, *os.uname()[:4])
    if not device.has_kernel(KERNEL) or not library.has_ping_pong or is_remembered(*facts):
        return
    ping_pong(device, library, _ROUNDS_AT_LOAD)
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


# From an artifact to the GPU that runs its hot part.


def open_cuda_accelerator(artifact: Artifact) -> CudaAccelerator:
    """Open the GPU for an artifact.

    Raises MachineError where no GPU here can run the artifact's code, or cannot meet the host within a step where the
    program asks for that; ArtifactError where there is no code for a GPU.
    """
    device = CudaAccelerator(read_cuda_images(artifact))
    try:
        if artifact.program.waiting_kernels:
            check_once(device, artifact.load_code())
    except BaseException:
        device.close()
        raise
    return device


def check_images(artifact: Artifact) -> None:
    """Raises ArtifactError where the code for a GPU lacks a kernel that the program calls; needs no GPU."""
    images, program = read_cuda_images(artifact), artifact.program
    for call in (call for name in program.functions for call in program.calls(name, "device")):
        if call.kernel not in images.kernels:
            raise ArtifactError(f"{artifact.folder}: the GPU code has no kernel {call.kernel}; compile the model again")
        for launch in images.kernels[call.kernel]:
            check_arguments(launch, len(call.args), call.kernel)


def read_cuda_images(artifact: Artifact) -> CudaImages:
    """Read the code for a GPU that an artifact has. Raises ArtifactError."""
    code = artifact.manifest.accelerator
    if code is None or code.kind != "cuda":
        raise ArtifactError(f"{artifact.folder}: has no code for a GPU; compile it again")
    text, cubin, ptx = (artifact.texts[code.files[role]] for role in ("launches", "cubin", "ptx"))
    images = read_images(text, cubin, ptx, str(artifact.folder / code.files["launches"]))
    if images.sm != code.sm:
        raise ArtifactError(f"{artifact.folder}: manifest.json and {code.files['launches']} disagree on sm")
    return images
