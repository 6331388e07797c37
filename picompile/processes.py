"""Child processes that do not outlive who started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Has the kernel end this process when `parent`, which started it, ends, however that happens.

    For processes that the parent's main thread starts, since the kernel goes by the thread. To be called before what
    takes time to import.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
