"""Child processes that do not outlive who started them."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Has the kernel end this process when the one that started it ends, however that happens.

    For processes that the main thread starts, since the kernel goes by the thread, and that read their work from a
    pipe: whoever asks for that after the other has ended finds the pipe's end.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
