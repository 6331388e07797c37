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


# Objects that are made between two searches for garbage. Python's default is 700, which are a few nodes of a graph.
_BETWEEN_SEARCHES = 200_000


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for garbage seldom in the block, which makes many objects that stay, such as graphs.

    Looking takes a tenth of the time of a compilation. Collection is as before after the block.
    """
    before = gc.get_threshold()
    if before[0] and before[0] < _BETWEEN_SEARCHES:
        gc.set_threshold(_BETWEEN_SEARCHES, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
