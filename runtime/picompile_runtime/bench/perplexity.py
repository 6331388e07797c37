"""The perplexity of a text under the compiled model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown, token_ids
from picompile_runtime.sampling.sampler import Logits, no_scores

# The ways to read a text: see `token_losses`.
Reading = Literal["chunks", "masked chunks", "tokens"]


@dataclass(frozen=True)
class Perplexity:
    """`nll` is the summed negative log-likelihood, in nats, of the `tokens` that were predicted."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); infinite if that is too large for a float."""
        return float(np.exp(np.float64(self.nll / self.tokens))) if self.nll / self.tokens < 709 else math.inf


def perplexity(
    engine: Engine,
    ids: Sequence[int],
    window: int | None = None,
    by_decode: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a text: every token of `ids` but the first is predicted.

    The text is cut into windows that do not overlap, and each window is read with nothing before it.

    Args:
        engine: the engine, whose slot 0 is used.
        ids: token ids of the text, at least 2.
        window: tokens in a window, by default the engine's context.
        by_decode: whether to read as text is generated (`decoded`). That is slower, but shows the effect of
            predictors: reading a prompt computes every neuron.
        progress: called with the number of tokens done and the number of all tokens.

    Raises:
        RequestError: an argument makes no sense.
        KernelError: a kernel failed, or logits contain NaN.
    """
    window = engine.context if window is None else window
    if not isinstance(window, int | np.integer) or isinstance(window, bool) or not 1 <= window <= engine.context:
        raise RequestError(f"a window of {shown(window)} tokens does not fit the context of {engine.context}")
    tokens, nll = token_ids(ids, engine.vocab, least=0).astype(np.int64), 0.0
    if len(tokens) < 2:
        raise RequestError(f"perplexity needs at least 2 tokens, not {len(tokens)}; give a longer text")
    for start in range(0, len(tokens) - 1, window):
        losses = token_losses(engine, tokens[start : start + window + 1].tolist(), "tokens" if by_decode else "chunks")
        nll += float(losses.sum())
        if progress:
            progress(start + len(losses), len(tokens) - 1)
    return Perplexity(nll, len(tokens) - 1)


def token_losses(engine: Engine, ids: Sequence[int], reading: Reading = "chunks") -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token of `ids` but the first, in nats, float64 [tokens - 1].

    They are read with nothing before them, in slot 0: in chunks with every neuron, in chunks with the neurons that
    predictors name (`Engine.scores_masked`), or token by token, as text is generated (`decoded`).

    Raises:
        RequestError: they do not fit the context, or the artifact cannot be read so.
        KernelError: a kernel failed, or logits contain NaN.
    """
    engine.reset()
    inputs, targets = [int(token) for token in ids[:-1]], np.asarray(ids[1:], np.int64)
    masked = reading == "masked chunks"
    chunks = decoded(engine, inputs) if reading == "tokens" else engine.score(inputs, masked=masked)
    losses, start = np.empty(len(targets)), 0
    for logits in chunks:
        stop = start + len(logits)
        losses[start:stop] = negative_log_likelihood(logits, targets[start:stop])
        start = stop
    if np.isnan(losses).any():
        raise no_scores("contain NaN", engine.overflow())
    return losses


def decoded(engine: Engine, ids: Sequence[int]) -> Iterator[Logits]:
    """Read the tokens `ids` in slot 0 as text is generated, and yield the logits after each of them.

    As many are read in a step as the program can check of a draft, to the bits of one after another.

    Yields:
        Logits float32 [tokens of a step, vocab].

    Raises:
        RequestError: they do not fit the context.
        KernelError: a kernel failed.
    """
    for start in range(0, len(ids), engine.most_checked):
        scores = engine.read_each(ids[start : start + engine.most_checked])
        yield np.stack([each.logits() for each in scores])


def negative_log_likelihood(logits: Logits, targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return -log softmax(logits)[target] of each row, float64 [n], for logits [n, vocab] and targets [n].

    Exponentials are in float32, a fifth of the time, and their errors average out: the result is within 1e-7 of what
    float64 gives. Sums are in float64.
    """
    highest = logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a difference that is not finite has an exponential of 0
        exponentials = np.exp(logits - highest)
    total = np.log(exponentials.sum(axis=1, dtype=np.float64)) + highest[:, 0]
    losses: NDArray[np.float64] = total - logits[np.arange(len(targets)), targets].astype(np.float64)
    return losses
