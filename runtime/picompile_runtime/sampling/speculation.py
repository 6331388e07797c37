"""Speculative decoding: tokens are drafted, and one step checks all of them.

A step for a few tokens takes less time than as many steps for one, since matrices are read once. Every row of its
scores has the bits that decoding gives, and the sampler chooses from the rows in order, until it chooses another token
than was drafted. So the text is the one without drafts, token by token, whatever the temperature and the seed.

Drafts come from the text itself (n-grams, or prompt lookup decoding): if its last tokens occurred before, the tokens
that followed them then are the draft. Every token is compared with the draft that would have been made, even if none
was. So drafts are made, and cost time, only where they would have been accepted lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown

DRAFTS = ("ngram", "none")

# Ends of the text by which an earlier occurrence is found, the longest first, and how much of it is compared then.
_LENGTHS = (4, 3, 2)
_LONGEST = 32
# The more tokens before a place are those before the end of the text, the likelier the next one is as well: where ends
# of so many tokens or more stood before, this share of drafted tokens is expected to be accepted until it was seen.
_EXPECTED = {2: 0.1, 3: 0.15, 4: 0.25, 6: 0.4, 9: 0.5, 16: 0.7}
# What is expected counts as so many tokens, and one that was seen counts less with every other that is seen.
_EXPECTED_WEIGHT, _KEPT = 8.0, 0.95
# Steps of so many tokens take about as long as the last few did.
_TIME_WEIGHT = 0.25
# What a token more is expected to cost, as a share of a step for one, until it was measured.
_FIRST_COST = 0.35
# How much faster drafting must be expected to be.
_LEAST_GAIN = 1.05


class NgramDraft:
    """A drafter that expects the tokens that followed the text's last tokens earlier."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # For each end of the text, the place behind its latest occurrence.
        self._places: dict[int, int] = {}
        self._found: tuple[int, int] | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._tokens.append(token)
            self._found = None
            end = len(self._tokens)
            for length in _LENGTHS:
                if end >= length:
                    key = _key(self._tokens[end - length :])
                    if self._found is None and key in self._places:
                        self._found = self._common(length, self._places[key]), self._places[key]
                    self._places[key] = end

    def _common(self, length: int, place: int) -> int:
        """Return how many tokens before `place` are the last ones of the text: at least `length`."""
        tokens, end = self._tokens, len(self._tokens)
        while length < min(_LONGEST, place) and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    @property
    def length(self) -> int:
        """Length of the text's end that stood in it before, at most 32 tokens; 0 if not even two did."""
        return 0 if self._found is None else self._found[0]

    def draft(self, count: int) -> list[int]:
        """Return a draft of `count` tokens that follow the text, empty if its last tokens are new.

        Where the text has ended before there are so many, those of the draft are taken for a part of it.
        """
        if self._found is None:
            return []
        place = self._found[1]
        drafted = self._tokens[place : place + count]
        for i in range(count - len(drafted)):
            drafted.append(drafted[i])
        return drafted


def _key(tokens: list[int]) -> int:
    """Return a number for some tokens, another one for each list of them: unlike a tuple it is no work for Python's
    garbage collector."""
    key = len(tokens)
    for token in tokens:
        key = key << 32 | token
    return key


@dataclass
class DraftPolicy:
    """Decides how many tokens to draft: as many as promise the most tokens in the least time.

    `most_tokens` is how many tokens a step checks at most beside the one that is known.
    """

    most_tokens: int
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)

    def count(self, length: int) -> int:
        """Return how many tokens to draft where so many last tokens of the text stood before."""
        if not length or 1 not in self._seconds:
            return 0
        best, best_speed = 0, _LEAST_GAIN / self._seconds[1]
        expected = chance = 1.0
        for drafted in range(1, self.most_tokens + 1):
            chance *= self._share(length + drafted - 1)
            expected += chance
            speed = expected / self._expected_seconds(drafted + 1)
            if speed > best_speed:
                best, best_speed = drafted, speed
        return best

    def saw_token(self, length: int, was_right: bool) -> None:
        """Take note of whether the first token of a draft was right where so many last tokens stood before."""
        kind = _kind(length)
        right, seen = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = right * _KEPT + was_right, seen * _KEPT + 1.0

    def _share(self, length: int) -> float:
        """Return the share of drafted tokens that are expected to be accepted."""
        kind = _kind(length)
        right, seen = self._seen.get(kind, (0.0, 0.0))
        return (right + _EXPECTED[kind] * _EXPECTED_WEIGHT) / (seen + _EXPECTED_WEIGHT)

    def saw_step(self, tokens: int, seconds: float) -> None:
        """Take note of the time of a step that read so many tokens."""
        before = self._seconds.get(tokens)
        # The first step of its kind also loads its code.
        self._seconds[tokens] = seconds if before is None else before + (seconds - before) * _TIME_WEIGHT

    def _expected_seconds(self, tokens: int) -> float:
        """Return the time of a step for so many tokens: as measured, or estimated from the last measured one."""
        if tokens in self._seconds:
            return self._seconds[tokens]
        one, known = self._seconds[1], max(count for count in self._seconds if count < tokens)
        cost = _FIRST_COST * one if known == 1 else (self._seconds[known] - one) / (known - 1)
        return one + max(cost, 0.0) * (tokens - 1)


def _kind(length: int) -> int:
    return max(kind for kind in _EXPECTED if kind <= length)


class Speculation:
    """The drafts for one text, and the statistics of their checks."""

    def __init__(self, most_tokens: int) -> None:
        """Make drafts of at most so many tokens."""
        self._ngrams, self._policy = NgramDraft(), DraftPolicy(most_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and compare each with the draft that would have been made."""
        for token in tokens:
            if first := self._ngrams.draft(1):
                self._policy.saw_token(self._ngrams.length, first[0] == token)
            self._ngrams.add([token])

    def draft(self, room: int) -> list[int]:
        """Return the tokens to check in the next step, at most `room`; none if it should read one token alone."""
        return self._ngrams.draft(min(self._policy.count(self._ngrams.length), max(room, 0)))

    def saw_step(self, tokens: int, seconds: float) -> None:
        """Take note of the time of a step that read so many tokens."""
        self._policy.saw_step(tokens, seconds)


def speculate(draft: str, most_checked: int) -> Speculation | None:
    """Return drafts of a kind, one of DRAFTS, for steps that read so many tokens at most; None for no drafts.

    Raises RequestError for another kind.
    """
    return Speculation(most_checked - 1) if check_draft(draft) == "ngram" and most_checked > 1 else None


def check_draft(draft: str) -> str:
    """Return a kind of drafts. Raises RequestError unless it is one of DRAFTS."""
    if draft not in DRAFTS:
        raise RequestError(f"draft must be {' or '.join(DRAFTS)}, not {shown(draft)}")
    return draft
