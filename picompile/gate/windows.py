"""How much of a held-out text is read."""

from collections.abc import Sequence


def first_windows(windows: Sequence[Sequence[int]], tokens: int, longest: int | None = None) -> list[Sequence[int]]:
    """The first `tokens` ids at most, in windows of `longest` ids at most and of 2 at least.

    The first id of a window is given and the others are predicted: one alone tells nothing.
    """
    kept: list[Sequence[int]] = []
    room = tokens
    for window in windows:
        step = longest or len(window)
        for start in range(0, len(window), step or 1):
            piece = window[start : min(start + step, start + room)]
            if len(piece) >= 2:
                kept.append(piece)
                room -= len(piece)
    return kept
