"""Choosing the next token: scores from logits, the top k of them, and the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import KernelError, RequestError
from picompile_runtime.request_checks import real_number, shown, token_ids, whole_number

# Scores of the next token, and the top k of them, without sorting or converting the others.


# There are many more groups than tokens that are wanted, so that few of these are in the same group, and groups are so
# large that their highest scores are far fewer than all scores.
_GROUPS_PER_TOKEN, _LEAST_GROUP = 16, 4


def top_logits(scores: NDArray[Any], top_k: int) -> NDArray[np.int64]:
    """Return the tokens whose scores are no less than the k-th highest, int64 [n], ascending.

    They are more than k if several scores equal the k-th.

    Args:
        scores: [vocab].
        top_k: k; 0, or more than the vocabulary has, returns all tokens.
    """
    if not 0 < top_k < len(scores):
        return np.arange(len(scores))
    bound = _lower_bound(scores, top_k)
    ids = np.arange(len(scores)) if bound is None else np.flatnonzero(scores >= bound)
    some = scores[ids]
    kept: NDArray[np.int64] = ids[some >= _highest(some, top_k)]
    return kept


def _lower_bound(scores: NDArray[Any], top_k: int) -> Any | None:
    """Return a score that at least `top_k` scores reach; None if finding one would not save time.

    It is the k-th highest among the highest scores of groups.
    """
    groups = _GROUPS_PER_TOKEN * top_k
    size = len(scores) // groups
    if size < _LEAST_GROUP:
        return None
    return _highest(scores[: size * groups].reshape(size, groups).max(axis=0), top_k)


def _highest(scores: NDArray[Any], place: int) -> Any:
    """Return the score at `place`, counted from the highest, which is at place 1."""
    return np.partition(scores, len(scores) - place)[len(scores) - place]


Logits = NDArray[np.float32]


@dataclass(frozen=True)
class TopScores:
    """The top logits of a vocabulary, and their tokens.

    Attributes:
        scores: float32 [n], descending; NaN comes before all numbers.
        ids: their tokens, int32 [n], ascending among equal scores.
        is_all: whether the vocabulary has no other tokens. Else the others' scores are no higher than the last one.
    """

    scores: Logits
    ids: NDArray[np.int32]
    is_all: bool

    @property
    def highest(self) -> tuple[int, float]:
        """The first token with the highest score, and the score."""
        return int(self.ids[0]), float(self.scores[0])

    def top(self, count: int) -> tuple[NDArray[np.int64], Logits] | None:
        """Return the tokens whose scores are no less than the `count`-th, ascending, and their scores.

        A `count` of 0 asks for all tokens. Returns None if tokens that are not known here may be among them.
        """
        if 0 < count < len(self.ids):
            return self.at_least(self.scores[count - 1])
        return self.at_least(self.scores[-1]) if self.is_all else None

    def at_least(self, bound: np.float32 | float) -> tuple[NDArray[np.int64], Logits] | None:
        """Return the tokens whose scores are no less than `bound`, ascending, and their scores; None as for `top`."""
        kept = self.scores >= bound
        if kept[-1] and not self.is_all:
            return None
        ids = self.ids[kept].astype(np.int64)
        order = np.argsort(ids)
        return ids[order], self.scores[kept][order]


@dataclass(frozen=True)
class Scores:
    """The scores of the next token.

    Attributes:
        logits: returns the scores of the whole vocabulary, float32 [vocab], in the engine's memory, which its next step
            overwrites. If the accelerator has them, it copies them from there.
        top_logits: the highest of them, which the host has already, if the accelerator has the others; else None.
    """

    logits: Callable[[], Logits]
    top_logits: TopScores | None = None


# Choosing the next token from logits.
#
# The steps and their order are those of Hugging Face's `generate` (transformers, generation/logits_process.py):
# repetition penalty over prompt and generated tokens, temperature, top-k, top-p, min-p; then a draw from what is left.


Tokens = NDArray[np.int64]
Probabilities = NDArray[np.float64]

_MOST = 2**128 - 1  # the largest seed of the generator
_PENALTIES = (1e-6, 1e6)  # far beyond useful values; with any float32 as score the results are numbers
_MANY = 1024  # tokens; sorting fewer takes hardly any time


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token.

    Attributes:
        temperature: 0 takes the most probable token, the one with the lowest id among equals.
        top_k: keeps the k most probable tokens; 0 keeps all.
        top_p: keeps the most probable tokens that have this probability together; 1 keeps all.
        min_p: keeps tokens at least this share as probable as the most probable one; 0 keeps all.
        repetition_penalty: makes tokens that occurred less probable above 1; 1 changes nothing.
        seed: makes the choices repeatable.

    Raises:
        RequestError: a value makes no sense.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        real_number("temperature", self.temperature, lambda value: value >= 0, "0 or more")
        whole_number("top_k", self.top_k, 0, _MOST, "0 (off) or a positive integer")
        real_number("top_p", self.top_p, lambda value: 0 < value <= 1, "above 0 and at most 1")
        real_number("min_p", self.min_p, lambda value: 0 <= value <= 1, "from 0 to 1")
        least, most = _PENALTIES
        must = f"from {least:f} to {most:.0f}"
        real_number("repetition_penalty", self.repetition_penalty, lambda value: least <= value <= most, must)
        if self.seed is not None:
            whole_number("seed", self.seed, 0, _MOST, "a whole number from 0 to 2^128 - 1")


class Sampler:
    """Chooses the tokens of one sequence, and remembers which tokens occurred in it."""

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        """Make a sampler for a vocabulary of `vocab` tokens. Raises RequestError if an argument makes no sense."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"a sampler takes SamplingParams, not {shown(params)}")
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._seen = np.zeros(whole_number("the vocabulary", vocab, 1, 2**31 - 1), bool)

    def observe(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Note the tokens of a prompt for the repetition penalty. Raises RequestError unless they are token ids."""
        if len(tokens := token_ids(ids, len(self._seen), least=0)):
            self._seen[tokens] = True

    def sample(self, logits: NDArray[Any] | Scores) -> int:
        """Choose the next token, note that it occurred, and return it.

        Args:
            logits: [vocab], or an engine's `Scores`. Of these it uses only the top logits if they suffice: with
                temperature 0 or top-k, and without a penalty. The token is the same as for all logits.

        Raises:
            RequestError: `logits` are not one number for each token.
            KernelError: they contain NaN, or rule out every token.
        """
        if self.params.temperature == 0:
            token = self._greedy(logits)
        else:
            token = _draw(*self._possible(logits), self._random.random())
        self._seen[token] = True
        return token

    def distribution(self, logits: NDArray[Any] | Scores) -> tuple[Tokens, Probabilities]:
        """Return the tokens that may be chosen, int64 [n], ascending by probability, and their probabilities.

        These are float64 [n] and add up to 1. Raises RequestError and KernelError as `sample` does.
        """
        ids, probabilities = self._possible(logits)
        order = _ascending(ids, probabilities)
        return ids[order], probabilities[order]

    def _possible(self, logits: NDArray[Any] | Scores) -> tuple[Tokens, Probabilities]:
        """Return the tokens that may be chosen and their probabilities, in any order."""
        params = self.params
        if params.temperature == 0:
            return np.array([self._greedy(logits)]), np.ones(1)
        ids, scores, highest = self._top_k(logits)
        if highest == np.inf:  # in the limit, only these tokens are possible, with equal probabilities
            weights = np.ones(len(ids))
        else:
            with np.errstate(over="ignore"):
                weights = np.exp((scores.astype(np.float64) - highest) / params.temperature)
        ids, probabilities = _top_p(ids, weights / weights.sum(), params.top_p)
        probable = (probabilities > 0) & (probabilities >= params.min_p * probabilities.max())
        return ids[probable], probabilities[probable] / probabilities[probable].sum()

    def _greedy(self, logits: NDArray[Any] | Scores) -> int:
        """Return the first token with the highest score."""
        known = self._known(logits)
        token, highest = _likeliest(self._scores(logits)) if known is None else known.highest
        _check_highest(highest)
        return token

    def _top_k(self, logits: NDArray[Any] | Scores) -> tuple[Tokens, NDArray[Any], float]:
        """Return the tokens that top-k keeps, ascending, or those with infinite scores; their scores; the highest."""
        top_k = int(self.params.top_k)
        if (known := self._known(logits)) is not None:
            _, highest = known.highest
            _check_highest(highest)
            found = known.at_least(highest) if highest == np.inf else known.top(top_k)
            if found is not None:
                return *found, highest
        scores = self._scores(logits)
        _, highest = _likeliest(scores)
        _check_highest(highest)
        ids = np.flatnonzero(scores == np.inf) if highest == np.inf else top_logits(scores, top_k)
        return ids, scores[ids], highest

    def _known(self, logits: NDArray[Any] | Scores) -> TopScores | None:
        """Return the top logits if they are known and no penalty changes them, else None."""
        return logits.top_logits if isinstance(logits, Scores) and self.params.repetition_penalty == 1.0 else None

    def _scores(self, logits: NDArray[Any] | Scores) -> NDArray[Any]:
        """Return the logits after the penalty, which does not change the array that was passed."""
        if isinstance(logits, Scores):
            logits = logits.logits()
        logits = self._checked(logits)
        penalty = self.params.repetition_penalty
        if penalty == 1.0 and logits.dtype.kind == "f":
            return logits
        scores = np.array(logits, np.float64)
        of_seen = scores[self._seen]
        scores[self._seen] = np.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
        return scores

    def _checked(self, logits: Any) -> NDArray[Any]:
        """Return the logits as an array [vocab] of numbers. Raises RequestError."""
        try:
            scores = np.asarray(logits)
        except Exception as error:  # whatever an object that is no list raises
            raise self._no_logits(logits) from error
        if scores.shape != self._seen.shape or scores.dtype.kind not in "fiu":
            raise self._no_logits(scores)
        return scores

    def _no_logits(self, given: object) -> RequestError:
        found = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else shown(given)
        return RequestError(f"logits must be {len(self._seen)} numbers, one for each token, not {found}")


def _likeliest(scores: NDArray[Any]) -> tuple[int, float]:
    """Return the first token with the highest score, and the score."""
    token = int(scores.argmax())  # the first NaN, if there is one
    return token, float(scores[token])


def _check_highest(highest: float) -> None:
    """Raise KernelError if scores contain NaN or are all minus infinity, given the highest of them."""
    if math.isnan(highest) or highest == -math.inf:
        kind = "contain NaN" if math.isnan(highest) else "rule out every token"
        raise KernelError(f"the model's logits {kind}: its weights or the artifact's code are broken; try `verify`")


def _top_p(ids: Tokens, probabilities: Probabilities, top_p: float) -> tuple[Tokens, Probabilities]:
    """Cut off the least probable tokens, which have at most 1 - top_p together, and return the others."""
    if top_p == 1:
        return ids, probabilities
    improbable = 0.0
    if len(ids) > _MANY:
        # Each of these is so improbable that even all tokens like it together are cut off; they need no order.
        cut = probabilities < 0.99 * (1 - top_p) / len(ids)
        improbable = float(probabilities[cut].sum())
        ids, probabilities = ids[~cut], probabilities[~cut]
    order = _ascending(ids, probabilities)
    kept = np.cumsum(probabilities[order]) > 1 - top_p - improbable
    kept[-1] = True
    return ids[order[kept]], probabilities[order[kept]]


def _draw(ids: Tokens, probabilities: Probabilities, share: float) -> int:
    """Return the token at which the sum of the probabilities, ascending, exceeds `share`."""
    while len(ids) > _MANY:  # sorting them all would take longer
        below = probabilities < probabilities.mean()
        if below.all() or not below.any():  # all alike, but for rounding
            break
        sum_below = float(probabilities[below].sum())
        part = below if share < sum_below else ~below
        share -= 0.0 if share < sum_below else sum_below
        ids, probabilities = ids[part], probabilities[part]
    order = _ascending(ids, probabilities)
    place = int(np.searchsorted(np.cumsum(probabilities[order]), share, side="right"))
    return int(ids[order[min(place, len(order) - 1)]])


def _ascending(ids: Tokens, probabilities: Probabilities) -> NDArray[np.int64]:
    """Return the order by ascending probability, the higher id first among equals: top-p cuts off from the front."""
    order = np.argsort(probabilities)
    ordered = probabilities[order]
    equal = ordered[1:] == ordered[:-1]
    if equal.any():
        some = np.append(equal, False)
        some[1:] |= equal
        places = order[some]
        order[some] = places[np.lexsort((-ids[places], probabilities[places]))]
    return order
