"""Progress of long-running steps, for whatever shows it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Receives the steps of a compilation."""

    def step(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Open a step; the returned `advance(n)` counts towards `total`, in a unit of the step's own."""
        ...

    def say(self, text: str) -> None:
        """Show the user one line that matters: what was assumed, or is done again."""
        ...


class NoProgress:
    """A `Progress` that shows nothing."""

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Open a step."""
        yield lambda count: None

    def say(self, text: str) -> None:
        """Ignore the line."""
