"""A workbench for kernels of another processor: qemu runs them, and the references are those of all kernel tests."""

import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.kernels.workbench import Guarded, Workbench
from picompile_codegen.build.isa import Isa
from picompile_codegen.cpu.kernel import Kernel

DRIVER = Path(__file__).parent / "kernel_driver.c"
_DL_CODES = {"i": 0, "u": 1, "f": 2}  # numpy's kind -> DLDataTypeCode
_NAME_BYTES = 120


def require(*commands: str) -> None:
    """Skips where a command is missing."""
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: apt install qemu-user gcc-aarch64-linux-gnu)")


class EmulatedWorkbench(Workbench):
    """Kernels for `isa` in one library, run by qemu as the processor `cpu`, one process a call."""

    def __init__(self, path: Path, kernels: Sequence[Kernel], isa: Isa, cpu: str) -> None:
        compiler = "gcc" if isa.machine == platform.machine() else f"{isa.machine}-linux-gnu-gcc"
        require(compiler, f"qemu-{isa.machine}")
        super().__init__(path, kernels, isa)
        self.driver = path.with_suffix(".driver")
        flags = ["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *flags, "-o", self.driver, DRIVER, "-ldl"], check=True)
        root = [] if compiler == "gcc" else ["-L", f"/usr/{isa.machine}-linux-gnu"]
        self.emulator = [f"qemu-{isa.machine}", *root, "-cpu", cpu]

    def call(self, kernel: Kernel, arrays: Sequence[Guarded], threads: int) -> None:
        """Hands the arrays over with their guards, and takes all of it back."""
        request = self.path.with_suffix(f".{os.getpid()}.request")
        symbol = f"__tvm_ffi_{kernel.name}".encode()
        assert len(symbol) < _NAME_BYTES
        with request.open("wb") as file:
            file.write(struct.pack(f"{_NAME_BYTES}sii", symbol, threads, len(arrays)))
            for guarded in arrays:
                file.write(_described(guarded))
            data = file.tell()
            for guarded in arrays:
                file.write(guarded.memory)
        done = subprocess.run([*self.emulator, self.driver, self.path, request], capture_output=True, text=True)
        assert done.returncode == 0, f"{kernel.name}: ended with {done.returncode}: {done.stderr}"
        with request.open("rb") as file:
            file.seek(data)
            for guarded in arrays:
                file.readinto(guarded.memory)


def _described(guarded: Guarded) -> bytes:
    array = guarded.array
    offset = array.ctypes.data - guarded.memory.ctypes.data
    shape = [*array.shape, *[0] * (8 - array.ndim)]
    dtype = (_DL_CODES[array.dtype.kind], 8 * array.itemsize)
    return struct.pack("qqiiii8q", guarded.memory.nbytes, offset, array.ndim, *dtype, 0, *shape)
