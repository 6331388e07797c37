"""Listeners of a scheduler that keep what they are told, and hold it to the order of events."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from helpers.fake_engine import SoloAnswer
from picompile_runtime.serving.request import Event, Finished, PromptRead, TokenChosen


@dataclass
class Told:
    """A listener. The events of an answer are its prompt, its tokens, its end; a cancelled one may lack the first."""

    events: list[Event] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        before = self.events[-1] if self.events else None
        assert not isinstance(before, Finished), "nothing follows the end"
        assert isinstance(event, PromptRead) == (before is None) or isinstance(event, Finished)
        self.events.append(event)
        if isinstance(event, Finished):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenChosen)]

    @property
    def prompt(self) -> PromptRead:
        first = self.events[0]
        assert isinstance(first, PromptRead)
        return first

    @property
    def end(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def reason(self) -> str:
        return self.end.reason

    def answer(self) -> SoloAnswer:
        """Return what was told, in the form of what `answer_alone` returns."""
        assert self.end.error == ""
        chosen = [event for event in self.events if isinstance(event, TokenChosen)]
        return SoloAnswer(
            tuple(event.token for event in chosen),
            tuple(event.log_probability for event in chosen),
            self.prompt.log_probabilities,
            self.reason,
        )

    def is_beginning_of(self, expected: SoloAnswer) -> bool:
        """Whether an answer that was cut off is what `expected` begins with."""
        chosen = [event for event in self.events if isinstance(event, TokenChosen)]
        return all(
            (event.token, event.log_probability) == pair
            for event, pair in zip(chosen, zip(expected.tokens, expected.log_probabilities, strict=True), strict=False)
        ) and len(chosen) <= len(expected.tokens)
