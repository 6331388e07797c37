"""A look at the GPU now and then while a step takes long: the host waits for flags in it, and asks no driver."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_LOOK_S = 0.25  # steps that answer take less, but for prompts


class Watch:
    """Sets abandoned[0] if the GPU `has_failed` while a step runs. Its thread sleeps while there are no steps.

    A step costs two additions here. It holds no device, so that one that is not closed can be collected.
    """

    def __init__(self, has_failed: Callable[[], bool], abandoned: NDArray[np.int32]) -> None:
        self._has_failed, self._abandoned = has_failed, abandoned
        self._changes = 0  # steps begun and ended: odd while one runs
        self._is_asleep = False
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="picompile-gpu-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A step begins."""
        self._changes += 1
        if self._is_asleep:
            self._wake.set()

    def end(self) -> None:
        """The step is over, or none has begun."""
        self._changes += self._changes % 2

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._wake.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.is_set():
            before = self._changes
            self._end.wait(_LOOK_S)
            if self._changes != before:
                continue
            if before % 2 == 0:
                self._sleep()
            elif self._has_failed():
                self._abandoned[0] = 1

    def _sleep(self) -> None:
        self._wake.clear()
        self._is_asleep = True
        if self._changes % 2 == 0 and not self._end.is_set():  # a step may have begun before it could see this
            self._wake.wait()
        self._is_asleep = False
