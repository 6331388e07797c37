"""The process itself: that a child does not outlive its parent, and what is not worth collecting."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent process `parent` ends, however that happens.

    Only for processes that the parent's main thread starts, because the kernel watches that thread. Call it before
    imports that take time.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for garbage in the block, where PyTorch and TVM are imported in it.

    What they define stays, and is not looked through later on either. Looking would take a quarter of the time of
    planning a shape, and a second and a half of each compilation.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
