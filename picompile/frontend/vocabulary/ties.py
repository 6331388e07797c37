"""Pieces of equal scores: sentencepiece joins the leftmost pair of equals, and a list of merges has no equals.

Merged vocabularies have them, as Chinese-LLaMA-Alpaca's, whose new pieces all have the score 0.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random

from picompile.frontend.messages import shown_text

_DRAWN, _MOST_PARTS, _MOST_LETTERS, _SEED = 200, 4, 100, 50
_Pair = tuple[str, str]


def note_of_ties(file: Path, scores: Mapping[str, float], merges: Sequence[_Pair]) -> tuple[str, ...]:
    """Return a line that names a text that is cut otherwise than by sentencepiece, since scores are equal.

    Texts of pieces that overlap are cut in both ways: by the scores, and by the merges that were made of them. There is
    no line where all of them agree.

    Args:
        file: the vocabulary's, for the line.
        scores: the score of each piece, as the file has it.
        merges: the pairs of pieces that make a piece, best first.
    """
    counts = Counter(score for piece, score in scores.items() if len(piece) > 1 and score < inf)
    tied = [pair for pair in merges if counts[scores["".join(pair)]] > 1]
    if not tied:
        return ()
    ranks = {pair: rank for rank, pair in enumerate(merges)}

    def by_score(pair: _Pair) -> float | None:
        return -scores["".join(pair)] if pair in ranks else None

    for text in _overlapping(scores, tied):
        ours, theirs = _joined(text, ranks.get), _joined(text, by_score)
        if ours != theirs:
            cut = f"{shown_text(text)} is cut into {_shown(ours)}, by sentencepiece and llama.cpp into {_shown(theirs)}"
            return (f"{file}: tokens have equal scores, so that {cut}",)
    return ()


def _overlapping(scores: Mapping[str, float], tied: Sequence[_Pair]) -> Iterator[str]:
    """Yield texts that are drawn, in which two pieces of equal scores share a part."""
    by_left: dict[tuple[float, str], list[_Pair]] = defaultdict(list)
    for pair in tied:
        by_left[scores["".join(pair)], pair[0]].append(pair)
    first = [pair for pair in tied if (scores["".join(pair)], pair[1]) in by_left]
    draw = Random(_SEED)
    for _ in range(_DRAWN if first else 0):
        pair = draw.choice(first)
        parts = list(pair)
        while len(parts) < _MOST_PARTS and (behind := by_left.get((scores["".join(pair)], pair[1]))):
            pair = draw.choice(behind)
            parts.append(pair[1])
        text = "".join(parts)
        if len(text) <= _MOST_LETTERS:
            yield text


def _joined(text: str, key: Callable[[_Pair], float | None]) -> list[str]:
    """Return the parts of a text after all joins: of the pair with the lowest key, the leftmost of equals."""
    parts = list(text)
    while True:
        found = [(value, at) for at, pair in enumerate(pairwise(parts)) if (value := key(pair)) is not None]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def _shown(parts: Sequence[str]) -> str:
    return " ".join(map(shown_text, parts))
