"""Merges of a vocabulary that has scores instead of merges."""

from collections.abc import Mapping
from itertools import islice
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
    transformers converts (`generate_merges`), and as rows of one letter grow from the left.

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
    return [(piece[:-before], piece[-before:]) for _, before, _, _, piece in cuts]
