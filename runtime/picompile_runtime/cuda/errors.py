"""What can go wrong with the CUDA driver. Each error is also one of the runtime's tree, which says its exit code.

| exit code | meaning | raised as |
| --- | --- | --- |
| 1 | a call of the driver failed, or a kernel did | `GpuCallError`, a `KernelError` |
| 5 | the GPU's memory is full | `GpuMemoryError`, a `DoesNotFitError` |
| 6 | no driver, no GPU, too old, or another GPU than the code is for | `NoGpuError`, a `MachineError` |
"""

from __future__ import annotations

from picompile_runtime.errors import DoesNotFitError, KernelError, MachineError, PicompileRuntimeError

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of cuda.h, as all codes here
# Stub library, device unavailable, no device, invalid device, system not ready, driver mismatch, no compatibility.
_LACKS_GPU = frozenset({34, 46, 100, 101, 802, 803, 804})


class CudaError(PicompileRuntimeError):
    """There is no driver, no device, or a call of the driver failed; the text says which.

    `result` is the CUresult of the call, or 0 if no call failed.
    """

    def __init__(self, text: str, result: int = 0) -> None:
        super().__init__(text)
        self.result = result

    @property
    def call(self) -> str:
        """The call of the driver and its result, without what to do about it."""
        return str(self).partition(";")[0]


class NoGpuError(CudaError, MachineError):
    """This machine has no GPU that can be used, or none that can run the artifact's code."""


class GpuCallError(CudaError, KernelError):
    """A call of the driver failed, or something that the GPU did before it."""


class GpuMemoryError(CudaError, DoesNotFitError):
    """The GPU has not as much free memory as is needed."""


def call_error(text: str, result: int) -> CudaError:
    """The error for a call that returned `result`; `text` begins with its name."""
    if result == OUT_OF_MEMORY and "Host" in text.partition(":")[0]:
        return GpuMemoryError(f"{text}; close other programs: memory of this machine cannot be pinned", result)
    if result == OUT_OF_MEMORY:
        return GpuMemoryError(f"{text}; free memory of the GPU, or compile with a smaller --vram-budget", result)
    return (NoGpuError if result in _LACKS_GPU else GpuCallError)(text, result)
