"""Child processes that do not outlive the process that started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent process `parent` ends, however that happens.

    Only for processes that the parent's main thread starts, because the kernel watches that thread. Call it before
    imports that take time.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
