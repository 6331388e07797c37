"""Merges of a vocabulary that has scores instead of merges."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from math import inf
from pathlib import Path

from picompile.errors import UnsupportedModelError

# Gemma has 514,906. Twice as many take five seconds.
MOST_MERGES = 1 << 20
# All places at which a token can be cut are tried.
_MOST_CUTS = 1 << 26


def merges_by_rank(file: Path, scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make a piece, those of higher scores first.

    Sentencepiece joins the neighbours whose joint piece has the highest score, the leftmost ones of equals. A list of
    merges has an order even among the pairs of one piece; the longer left part comes first, as in the files that
    transformers converts (`generate_merges`), and as rows of one letter grow from the left. Among pieces of one score,
    those come first that are the left one of two which share a part.

    Raises `UnsupportedModelError`, which names `file`, for more merges than are read.
    """
    if sum(len(piece) ** 2 for piece in scores) > _MOST_CUTS:
        raise UnsupportedModelError(f"{file}: lists no merges, and has tokens that are too long to find them")
    ways = (
        (-score, -at, at - len(piece), rank, piece)
        for rank, (piece, score) in enumerate(scores.items())
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    )
    cuts = list(islice(ways, MOST_MERGES + 1))
    if len(cuts) > MOST_MERGES:
        raise UnsupportedModelError(
            f"{file}: its tokens can be made in more than {MOST_MERGES:,} ways of others, and no more are read"
        )
    cuts.sort()
    pairs = [(piece[:-before], piece[-before:]) for _, before, _, _, piece in cuts]
    return _leftmost_first(pairs, scores)


def _leftmost_first(pairs: list[tuple[str, str]], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs with those of one score ordered anew: first those that are mostly the left one of two.

    Two pairs compete for a part that is the right one of the first and the left one of the second; sentencepiece then
    takes the first. Rows of one letter, in which each competes with each, stay as they are.
    """
    counts = Counter(score for score in scores.values() if score < inf)
    if max(counts.values(), default=0) < 2:
        return pairs
    tied = [pair for pair in pairs if counts[scores["".join(pair)]] > 1 and len(set("".join(pair))) > 1]
    begin = Counter((scores["".join(pair)], pair[0]) for pair in tied)
    end = Counter((scores["".join(pair)], pair[1]) for pair in tied)
    place = dict.fromkeys(tied)

    def key(pair: tuple[str, str]) -> tuple[float, int]:
        score = scores["".join(pair)]
        return -score, end[score, pair[0]] - begin[score, pair[1]] if pair in place else 0

    return sorted(pairs, key=key) if tied else pairs
