"""From kernels to `host.so`: TVM compiles them to one object, and gcc links that with native/host.c."""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import tvm
from tvm.target import Target

from picompile_codegen.errors import BuildError
from picompile_codegen.kernels import Kernel

# AVX2, FMA and F16C: what x86 desktops have had since 2013. TVM takes an unknown name for a generic machine, and merely
# says so in its log; hence no choice here.
CPU_TARGET = {"kind": "llvm", "mcpu": "x86-64-v3"}

# Of TVM's pipelines this is the one that leaves local tensors on the stack, as kernels/tensor.py asks. The default one
# makes larger ones allocations from TVM's runtime, which an artifact does not have.
_PIPELINE = "tirx"

_HOST_SOURCE = Path(__file__).parent / "native" / "host.c"
_GCC_FLAGS = (
    "-shared", "-fPIC", "-std=c11", "-O2", "-fvisibility=hidden",
    # Calls between the library's own functions are not to be intercepted by another library's of the same name.
    "-Wl,-Bsymbolic",
    # The same input gives the same bytes: no identifier, and no symbol table with names of temporary files.
    "-Wl,--build-id=none", "-s",
)  # fmt: skip
_LIBRARIES = ("-lpthread", "-lm")


def build_host_library(kernels: Iterable[Kernel], output: Path) -> None:
    """Compiles `kernels` and writes the shared library to `output`, which may exist already.

    Kernels of the same name are taken to be the same. Raises `BuildError` with the compiler's message.
    """
    functions = {kernel.name: kernel.prim_func for kernel in kernels}
    with tempfile.TemporaryDirectory(prefix="picompile-build-") as folder:
        object_file = Path(folder) / "kernels.o"
        _compile(functions, object_file)
        _link(object_file, output)


def _compile(functions: dict[str, object], object_file: Path) -> None:
    module = tvm.IRModule({name: functions[name] for name in sorted(functions)})
    try:
        executable = tvm.compile(module, target=Target(CPU_TARGET), tir_pipeline=_PIPELINE)
        executable.mod.write_to_file(str(object_file), "o")
    except Exception as error:  # TVM raises many types, none of them its own
        raise BuildError(f"TVM cannot compile the kernels: {error}") from error


def _link(object_file: Path, output: Path) -> None:
    command = ["gcc", *_GCC_FLAGS, "-o", str(output), str(_HOST_SOURCE), str(object_file), *_LIBRARIES]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError("gcc is needed to link an artifact's code, and was not found") from error
    if result.returncode != 0:
        raise BuildError(f"gcc cannot link the kernels: {result.stderr.strip()}")
