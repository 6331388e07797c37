"""The library of `native/rounding.c`, which gcc makes when it is needed.

Making it takes a quarter of a second, on another core than the one that asks for it early.
"""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread

_SOURCE = Path(__file__).with_name("native") / "rounding.c"
# Neither contracted nor reassociated: the same weights give the same bytes on every machine.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")
_making = Lock()


def library() -> ctypes.CDLL | None:
    """Return the compiled code, None where there is no gcc, or where it fails."""
    with _making:
        return _made()


def begin() -> None:
    """Begin to make the library in a thread of its own."""
    Thread(target=library).start()


@cache
def _made() -> ctypes.CDLL | None:
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    with TemporaryDirectory(prefix="picompile-rounding-") as folder:
        path = Path(folder) / "rounding.so"
        built = subprocess.run([compiler, *_FLAGS, "-o", path, _SOURCE, "-lm"], capture_output=True, check=False)
        return ctypes.CDLL(str(path)) if built.returncode == 0 else None
