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


class Noting:
    """A `Progress` that hands all on to another, and notes in `said` the lines that the user is told."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.said: list[str] = []

    def step(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Open a step of the other."""
        return self._progress.step(title, total)

    def say(self, text: str) -> None:
        """Note the line, and have the other say it."""
        self.said.append(text)
        self._progress.say(text)
