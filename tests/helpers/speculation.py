"""Guesses that are right and wrong at will."""

from collections.abc import Sequence

import numpy as np
import pytest

from picompile_runtime.sampling.speculation import Speculation


class WrongGuesses:
    """Takes the place of the guesses of a `Speculation`: tokens of known texts, about half of them with a mistake."""

    def __init__(self, *texts: Sequence[int], seed: int) -> None:
        self._texts, self._rng = [list(text) for text in texts], np.random.default_rng(seed)
        self.guessed = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the class."""
        seen: dict[Speculation, list[int]] = {}

        def add(speculation: Speculation, tokens: Sequence[int]) -> None:
            seen[speculation] = [*seen.get(speculation, []), *tokens]

        monkeypatch.setattr(Speculation, "add", add)
        monkeypatch.setattr(Speculation, "guess", lambda each, room: self._guess(seen[each], room))

    def _guess(self, seen: list[int], room: int) -> list[int]:
        text = next(text for text in self._texts if text[: len(seen)] == seen)
        guess = text[len(seen) :][: min(int(self._rng.integers(0, 8)), max(room, 0))]
        if guess and self._rng.random() < 0.5:
            wrong = int(self._rng.integers(len(guess)))
            guess[wrong] = (guess[wrong] + 1) % (max(text) + 1)
        self.guessed += len(guess)
        return guess
