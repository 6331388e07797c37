"""How long-running steps tell their progress to whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Receives the steps of a compilation."""

    def step(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Opens one step; `advance(n)` counts towards `total`, in the unit that the step works in."""
        ...

    def say(self, text: str) -> None:
        """Tells the user one line that matters: what was taken for granted, or is done again."""
        ...


class NoProgress:
    """Shows nothing."""

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Opens one step."""
        yield lambda count: None

    def say(self, text: str) -> None:
        """Tells the user one line."""
