"""TVM's first error, made before it is expensive.

TVM takes a backtrace of every error, also of those that `import tvm` makes and ignores. For the first one it reads the
symbols of all libraries that are loaded: with PyTorch's, that is 0.7 s of 1.1 for the import. Made before PyTorch is
loaded, the error costs 0.2 s, in a thread that leaves Python alone. Later backtraces then lack the names of functions
in libraries that are loaded later.
"""

import ctypes
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread


class _Bytes(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


def begin() -> None:
    """Make the error in a thread of its own, unless PyTorch or TVM are loaded already."""
    if "torch" not in sys.modules and "tvm_ffi" not in sys.modules:
        Thread(target=_make_error, daemon=True).start()


def _make_error() -> None:
    # Whatever is wrong with the library is said where TVM is imported.
    with suppress(Exception):
        spec = find_spec("tvm_ffi")
        folder = Path((spec and spec.origin) or "").parent
        library = ctypes.CDLL(str(folder / "lib" / "libtvm_ffi.so"), mode=ctypes.RTLD_GLOBAL)
        name = b"no.such.type"
        library.TVMFFITypeKeyToIndex(ctypes.byref(_Bytes(name, len(name))), ctypes.byref(ctypes.c_int32()))
