"""Perplexity: how surprised the compiled model is by a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import KernelError, RequestError
from picompile_runtime.request_checks import shown, token_ids
from picompile_runtime.sampling.scores import Logits


@dataclass(frozen=True)
class Perplexity:
    """`nll`: summed negative log-likelihood, in nats, of the `tokens` that were predicted."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); infinite where that is beyond a float."""
        return float(np.exp(np.float64(self.nll / self.tokens))) if self.nll / self.tokens < 709 else math.inf


def perplexity(
    engine: Engine,
    ids: Sequence[int],
    window: int | None = None,
    by_decode: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Predict every token of `ids` but the first, in windows of `window` tokens (the context, unless given) that do not
    overlap; each window is read with nothing before it.

    Prompt processing computes every neuron. `by_decode` reads token by token instead, slower, as text is generated:
    what a predictor leaves out then shows. `progress` is called with the tokens done and their number.
    """
    window = engine.context if window is None else window
    if not isinstance(window, int | np.integer) or isinstance(window, bool) or not 1 <= window <= engine.context:
        raise RequestError(f"a window of {shown(window)} tokens does not fit the context of {engine.context}")
    tokens, nll = token_ids(ids, engine.vocab, least=0).astype(np.int64), 0.0
    if len(tokens) < 2:
        raise RequestError(f"perplexity needs at least 2 tokens, not {len(tokens)}; give a longer text")
    for start in range(0, len(tokens) - 1, window):
        engine.reset()
        targets = tokens[start + 1 : start + window + 1]
        inputs = tokens[start : start + len(targets)]
        chunks = (
            (engine.decode(token)[None] for token in inputs.tolist()) if by_decode else engine.score(inputs.tolist())
        )
        nll += sum(_window_nll(chunks, targets))
        if progress:
            progress(start + len(targets), len(tokens) - 1)
    if math.isnan(nll):
        raise KernelError("the model's logits contain NaN: its weights or the artifact's code are broken; try `verify`")
    return Perplexity(nll, len(tokens) - 1)


def _window_nll(chunks: Iterator[Logits], targets: NDArray[np.int64]) -> Iterator[float]:
    for logits in chunks:
        yield float(negative_log_likelihood(logits, targets[: len(logits)]).sum())
        targets = targets[len(logits) :]


def negative_log_likelihood(logits: Logits, targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log softmax(logits)[target] of each row, in float64; logits [n, vocab], targets [n]."""
    scores = logits.astype(np.float64)
    highest = scores.max(axis=1)
    total = np.log(np.exp(scores - highest[:, None]).sum(axis=1)) + highest
    losses: NDArray[np.float64] = total - scores[np.arange(len(targets)), targets]
    return losses
