"""Guesses that are right and wrong at will."""

from collections.abc import Sequence

import numpy as np
import pytest

from picompile_runtime.sampling.speculation import Speculation


class WrongDrafts:
    """Takes the place of the drafts of a `Speculation`: tokens of known texts, about half of them with a mistake."""

    def __init__(self, *texts: Sequence[int], seed: int) -> None:
        self._texts, self._rng = [list(text) for text in texts], np.random.default_rng(seed)
        self.drafted = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the class."""
        seen: dict[Speculation, list[int]] = {}

        def add(speculation: Speculation, tokens: Sequence[int]) -> None:
            seen[speculation] = [*seen.get(speculation, []), *tokens]

        monkeypatch.setattr(Speculation, "add", add)
        monkeypatch.setattr(Speculation, "draft", lambda each, room: self._draft(seen[each], room))

    def _draft(self, seen: list[int], room: int) -> list[int]:
        text = next(text for text in self._texts if text[: len(seen)] == seen)
        draft = text[len(seen) :][: min(int(self._rng.integers(0, 8)), max(room, 0))]
        if draft and self._rng.random() < 0.5:
            wrong = int(self._rng.integers(len(draft)))
            draft[wrong] = (draft[wrong] + 1) % (max(text) + 1)
        self.drafted += len(draft)
        return draft
