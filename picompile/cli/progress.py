"""Progress bars on stderr, and none where stderr is not a terminal.

A text is printed once, since a command that profiles, trains and compiles reads the same checkpoint in each.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING

from picompile.progress import Advance, NoProgress, Progress

if TYPE_CHECKING:
    import rich.progress

# A step that took less is removed from the screen when it ends: a dozen passes of milliseconds tell nobody anything.
_WORTH_KEEPING_S = 1.0


class _PlainProgress(NoProgress):
    """Shows no bars, but prints on stderr what the user should know, each text once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._print(text)

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a log that takes no more is no reason to end
            print(text, file=sys.stderr, flush=True)


class _TerminalProgress(_PlainProgress):
    """Shows each step as a line with a bar; the bar moves to and fro if the total is unknown."""

    def __init__(self, display: "rich.progress.Progress") -> None:
        super().__init__()
        self._display = display

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Advance]:
        task = self._display.add_task(title, total=total)
        started = monotonic()

        def advance(count: int) -> None:
            self._display.advance(task, count)

        yield advance
        if monotonic() - started < _WORTH_KEEPING_S:
            self._display.remove_task(task)
        else:
            total = total or 1
            self._display.update(task, total=total, completed=total)

    def _print(self, text: str) -> None:
        self._display.console.print(text, markup=False, highlight=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show the steps inside the block: as bars on a terminal, otherwise not at all."""
    if not sys.stderr.isatty():
        yield _PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

    left = TimeRemainingColumn(compact=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), left)
    with Display(*columns, console=Console(stderr=True)) as display:
        yield _TerminalProgress(display)
