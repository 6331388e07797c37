"""Runs CUDA C on the CPU: a source is compiled by g++ against emulation/, and its kernels take numpy arrays.

Blocks run one after another, the threads of a block as fibers, each until it must wait for others. Mistakes that a GPU
may hide are errors: barriers and collectives that not all threads reach, races, misaligned vectors, memory outside of
the arguments, indices outside of declared arrays. Shared memory begins as NaN in every block, locals as -1.7e38.

Not seen: indices outside of a shared array through a pointer, and loops without end that do not call __nanosleep.
"""

import _ctypes
import ctypes
import functools
import re
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.compiled import compile_once
from helpers.kernels.workbench import Guarded

Array = NDArray[Any]
Extents = tuple[int, int, int]

# In which order the threads of a block run between two of their meetings: 0 the first one first, 1 the last one first,
# 2 at random, 3 a warp for as long as it can, the last warp first. Every larger number is a random order of its own.
ORDERS = (0, 1, 2, 3)

_HERE = Path(__file__).parent / "emulation"
_HEADER = "cuda_emulation.h"

# Vectors are read through pointers to other types, so no strict aliasing.
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-g1")
# Locals that nobody sets hold 0xFE in every byte. Each check calls a function of faults.h or races.h.
_CHECKS = (
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=thread,alignment,bounds,shift-exponent",
    "-fno-sanitize-recover=all",
    "--param=tsan-distinguish-volatile=1",
    "--param=tsan-instrument-func-entry-exit=0",
)

_CODE = re.compile(r" \[code (0x[0-9a-f]+)\]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\(([^(),]*)[^()]*\)\s*")
_KERNEL = re.compile(rf'extern\s+"C"\s+__global__\s+((?:void\s+|{_BOUNDS.pattern})+)(\w+)\s*\(')


class EmulationError(Exception):
    """A kernel that does not compile, or that did what a GPU forbids."""


def _kernels(source: str) -> dict[str, str]:
    """Names of the kernels of `source`, and what they say about the threads of a block."""
    matches = _KERNEL.finditer(_COMMENT.sub(" ", source))
    bounds = {match[3]: _BOUNDS.search(match[1]) for match in matches}
    return {name: bound[1] if bound else "1024" for name, bound in bounds.items()}


def _table(kernels: dict[str, str]) -> str:
    rows = "".join(
        f'    {{"{name}", {threads}, emulated::Entry<{name}>::params, emulated::Entry<{name}>::call}},\n'
        for name, threads in kernels.items()
    )
    return (
        f"\nextern const emulated::Kernel emulated_kernels[] = {{\n{rows}}};\n"
        f"extern const int emulated_kernel_count = {len(kernels)};\n"
    )


@functools.cache
def _once(defines: tuple[str, ...]) -> tempfile.TemporaryDirectory[str]:
    """Compile what all sources share: emulation.o and the precompiled header. The process deletes them when it ends."""
    folder = tempfile.TemporaryDirectory(prefix="picompile-emulation-")
    options = [f"-D{name}" for name in defines]
    _compile("-Wall", *options, "-c", str(_HERE / "emulation.cpp"), "-o", f"{folder.name}/emulation.o")
    header = ["-x", "c++-header", str(_HERE / _HEADER), "-o", f"{folder.name}/{_HEADER}.gch"]
    _compile("-w", *_CHECKS, f"-I{_HERE}", *header)
    return folder


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *_FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulationError(done.stderr)


def _build(source: str, path: Path, defines: Sequence[str]) -> None:
    kernels = _kernels(source)
    if not kernels:
        raise EmulationError('the source has no kernel: `extern "C" __global__ void name(`')
    text = path.with_suffix(".cu")
    text.write_text(source + _table(kernels))

    def compile_library(library: Path) -> None:
        built, once = library.with_suffix(".o"), _once(tuple(defines)).name
        include = [f"-I{once}", f"-I{_HERE}", "-include", _HEADER]
        _compile("-w", *_CHECKS, *include, "-x", "c++", "-c", str(text), "-o", str(built))
        # Bound at load time: no fiber looks symbols up on its small stack.
        _compile("-shared", "-Wl,-z,now,-z,defs", f"{once}/emulation.o", str(built), "-o", str(library))

    # Errors name lines of a source by the name of its file.
    parts = [text.name, text.read_text(), *defines, *_FLAGS, *_CHECKS, _HERE]
    compile_once(path, parts, compile_library)


def _with_line(error: str, path: Path) -> str:
    """`error` with a line of the source for the place in the library that it names."""
    found = _CODE.search(error)
    if found is None:
        return error
    command = ["addr2line", "-i", "-e", str(path), found[1]]
    frames = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # Functions of headers are inlined in what the source calls them from.
    lines = re.findall(rf"/{re.escape(path.stem)}\.cu:(\d+)", frames)
    return _CODE.sub(f" (line {lines[-1]})" if lines else "", error)


class Emulated:
    """The kernels of a CUDA source, compiled for the CPU."""

    def __init__(self, source: str, path: Path, defines: Sequence[str] = ()) -> None:
        """Writes the library to `path`, and the source next to it. `defines` are macros of emulation.cpp.

        Raises EmulationError with what the compiler says.
        """
        self.path = path
        _build(source, path, defines)
        self._library = ctypes.CDLL(str(path))
        # The stacks of its threads are hundreds of mappings, of which a process may have 65,530.
        weakref.finalize(self, _ctypes.dlclose, self._library._handle)
        self._library.pi_emulate.restype = ctypes.c_char_p

    def launch(self, symbol: str, grid: Extents, block: Extents, arrays: Sequence[Array], order: int = 0) -> None:
        """Runs kernel `symbol` on `arrays`, one for each of its parameters, which it reads and writes.

        The kernel sees copies between guards. An array given twice is one for the kernel, too. Raises EmulationError
        for what the kernel did wrong, also if it wrote to an array that is read-only.
        """
        _check_overlaps(symbol, arrays)
        guarded = {id(array): Guarded.of(array.dtype, array.shape) for array in arrays}
        for array in arrays:
            guarded[id(array)].array[...] = array
        copies = [guarded[id(array)].array for array in arrays]
        self._restrict(copies)
        try:
            self.call(symbol, grid, block, [copy.ctypes.data for copy in copies], order)
        finally:
            self._restrict([])
        for number, array in enumerate(arrays):
            if not guarded[id(array)].is_intact():
                raise EmulationError(f"{symbol}: writes outside of argument {number}")
            _take_back(symbol, number, array, copies[number])

    def call(self, symbol: str, grid: Extents, block: Extents, addresses: Sequence[int], order: int = 0) -> None:
        """Runs kernel `symbol` on memory at `addresses`, which the host may change meanwhile."""
        params = self._library.pi_params(symbol.encode())
        if params >= 0 and params != len(addresses):
            raise EmulationError(f"{symbol}: {params} parameters, but {len(addresses)} arguments")
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        step = ctypes.sizeof(ctypes.c_void_p)
        places = (ctypes.c_void_p * len(addresses))(
            *[ctypes.addressof(values) + i * step for i in range(len(addresses))]
        )
        extents = ((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block))
        error = self._library.pi_emulate(symbol.encode(), *extents, places, order)
        if error is not None:
            raise EmulationError(_with_line(error.decode(), self.path))

    def _restrict(self, arrays: Sequence[Array]) -> None:
        """Launches of this thread may use `arrays` alone; any memory if there are none."""
        starts = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        sizes = (ctypes.c_size_t * len(arrays))(*[array.nbytes for array in arrays])
        if not self._library.pi_memory(starts, sizes, len(arrays)):
            raise EmulationError(f"{len(arrays)} arguments are more than can be watched")


def _check_overlaps(symbol: str, arrays: Sequence[Array]) -> None:
    for i, j in combinations(range(len(arrays)), 2):
        if arrays[i] is not arrays[j] and np.may_share_memory(arrays[i], arrays[j]):
            raise EmulationError(f"{symbol}: arguments {i} and {j} overlap, but are not the same array")


def _take_back(symbol: str, number: int, array: Array, copy: Array) -> None:
    if array.flags.writeable:
        array[...] = copy
    elif copy.tobytes() != array.tobytes():
        raise EmulationError(f"{symbol}: writes to argument {number}, which is read-only")
