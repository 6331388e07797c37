"""A splitter that divides an answer's text into reasoning and the rest, at once or piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from picompile_server.reasoning_formats import ReasoningFormat


class ReasoningSplitter:
    """Reads an answer piece by piece, however it is cut.

    Reasoning stands at the beginning alone. Text that may be one of the format's texts is held back until it is known
    not to be; spaces around reasoning belong to nothing.
    """

    def __init__(self, style: ReasoningFormat, is_open: bool = False) -> None:
        """Make a splitter; `is_open` says whether the prompt has begun the reasoning."""
        self._style, self._is_open = style, is_open
        self._held = ""
        self._reasoning = ""  # pieces that are certain
        self._answer = ""
        self._has_reasoned = False  # whether the reasoning has any text yet
        self._read: Callable[[], bool] = self._read_beginning

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in the reasoning."""
        return self._read == self._read_reasoning or (self._is_open and self._read == self._read_beginning)

    def feed(self, text: str) -> tuple[str, str]:
        """Add text, and return what is now certain of the reasoning, and of what follows it."""
        self._held += text
        while self._held and self._read():
            pass
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """Return the rest of both, after the last piece."""
        if self.is_reasoning:
            self._reasoning += self._held.rstrip()
        elif self._read != self._read_gap:
            self._answer += self._held
        self._held = ""
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        taken = self._reasoning, self._answer
        self._reasoning = self._answer = ""
        return taken

    # Each of these reads a part of what is held, and returns whether the next may read on. They are what comes next.

    def _read_beginning(self) -> bool:
        begin, text = self._style.begin.rstrip(), self._held.lstrip()
        if text.startswith(begin):
            self._held = text[len(begin) :]
            self._read = self._read_reasoning
        elif begin.startswith(text):
            return False
        elif self._is_open:
            self._read = self._read_reasoning
        else:
            self._read = self._read_opening
        return True

    def _read_reasoning(self) -> bool:
        text, end = self._held, self._style.end
        if not self._has_reasoned:
            text = self._held = text.lstrip()
        place = text.find(end)
        if place >= 0:
            self._reasoning += text[:place].rstrip()
            self._held = text[place + len(end) :]
            self._read = self._read_gap
            return True
        certain = len(text[: len(text) - beginning_length(text, end)].rstrip())
        self._reasoning += text[:certain]
        self._has_reasoned = self._has_reasoned or certain > 0
        self._held = text[certain:]
        return False

    def _read_gap(self) -> bool:
        """Read what follows the reasoning, up to the answer."""
        self._held = self._held.lstrip()
        if not self._held or not self._drop(self._style.between):
            return False
        self._read = self._read_opening
        return bool(self._held)

    def _read_opening(self) -> bool:
        """Read what stands before an answer that is text."""
        if self._style.before_answer and not self._drop(self._style.before_answer):
            return False
        self._read = self._read_answer
        return bool(self._held)

    def _drop(self, text: str) -> bool:
        """Leave out `text` if it is next, and return whether that is known."""
        if self._held.startswith(text):
            self._held = self._held[len(text) :]
            return True
        return not text.startswith(self._held)

    def _read_answer(self) -> bool:
        self._answer += self._held
        self._held = ""
        return False


def beginning_length(text: str, whole: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `whole`."""
    longest = min(len(text), len(whole) - 1)
    return next((length for length in range(longest, 0, -1) if whole.startswith(text[-length:])), 0)
