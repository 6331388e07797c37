"""Threads for work before a request reaches the scheduler, such as tokenizing texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from picompile_server.scheduler import QueueFullError

Result = TypeVar("Result")


class Workers:
    """Some threads with a bounded queue: a call that would wait behind too many others fails at once."""

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        """Make the workers.

        Args:
            name: the name of their threads.
            threads: how many there are.
            most_waiting: how much work may wait, beyond what the threads are doing.
        """
        self._pool = ThreadPoolExecutor(threads, name)
        self._most = most_waiting
        self._places = threading.Semaphore(threads + most_waiting)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread, and return its result. Raises QueueFullError, and the function's errors."""
        if not self._places.acquire(blocking=False):
            raise QueueFullError(f"{self._most} requests wait to be prepared already; try again later")
        try:
            future = self._pool.submit(function, *arguments)
        except RuntimeError:  # they are closed
            self._places.release()
            raise
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop the work that waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _release(self, future: Future[Any]) -> None:
        self._places.release()
