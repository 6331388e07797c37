"""Logits for `TopLogitsSpec`, of the CPU and of GPUs, and what a sort makes of them."""

import numpy as np

from helpers.kernels.workbench import Array
from picompile_codegen.specs import MOST_TOP_LOGITS


def logits_of(kind: str, rows: int, vocab: int) -> Array:
    """float32 [rows, vocab], other ones in each row."""
    rng = np.random.default_rng([len(kind), rows, vocab])
    values = rng.normal(0, 4, (rows, vocab)).astype(np.float32)
    if kind == "ties":
        return np.round(values / 2) * np.float32(2)
    if kind == "equal":
        return np.full((rows, vocab), -1.5, np.float32)
    if kind in ("rising", "falling"):
        values.sort(axis=1)
        return values if kind == "rising" else np.ascontiguousarray(values[:, ::-1])
    if kind == "zeros":
        # Both zeros are equal, and so small a number is not.
        return rng.choice(np.array([0.0, -0.0, -1e-45], np.float32), (rows, vocab))
    if kind == "infinite":
        return np.where(rng.random((rows, vocab)) < 0.4, np.copysign(np.float32(np.inf), values), values)
    if kind == "ruled out":
        values[:, np.arange(vocab) % 97 != 1] = -np.inf
    if kind == "nan":
        values[rng.random((rows, vocab)) < 3 / vocab] = np.nan
        values[:, vocab // 2] = np.array(0xFFC00001, np.uint32).view(np.float32)  # one with a sign
    return values


KINDS = ("normal", "ties", "equal", "rising", "falling", "zeros", "infinite", "ruled out", "nan")


def expected(logits: Array) -> tuple[Array, Array]:
    """Scores and ids: a NaN before all, then by score, then by id."""
    is_nan = np.isnan(logits)
    falling = -np.where(is_nan, np.float32(0), logits)
    ids = np.stack([np.lexsort((row, ~nan)) for row, nan in zip(falling, is_nan, strict=True)])[:, :MOST_TOP_LOGITS]
    return np.take_along_axis(logits, ids, axis=1), ids


def check(result: dict[str, Array], logits: Array) -> None:
    """Check that the first rows have the bits of the highest logits, and that the other rows are as they were."""
    scores, ids = expected(logits)
    tokens = len(logits)
    assert np.array_equal(result["ids"][:tokens], ids)
    assert np.array_equal(result["scores"][:tokens].view(np.uint32), scores.view(np.uint32))
    assert (result["ids"][tokens:] == -1).all() and np.isnan(result["scores"][tokens:]).all()
