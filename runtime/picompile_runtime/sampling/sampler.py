"""Choosing the next token: scores from logits, the top k of them, and the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import CacheOverflowError, KernelError, RequestError
from picompile_runtime.request_checks import real_number, shown, token_ids, whole_number
from picompile_runtime.sampling.penalties import ScoreChanges

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
        reason: returns why they may be no numbers, if that is known.
    """

    logits: Callable[[], Logits]
    top_logits: TopScores | None = None
    reason: Callable[[], str | None] | None = None


# Choosing the next token from logits.
#
# The steps and their order are those of Hugging Face's `generate` (transformers, generation/logits_process.py):
# repetition penalty over prompt and generated tokens, temperature, top-k, top-p, min-p; then a draw from what is left.
# What OpenAI's API adds comes before the temperature: see penalties.py. A mask of allowed tokens comes behind it.


Tokens = NDArray[np.int64]
Probabilities = NDArray[np.float64]

_MOST = 2**128 - 1  # the largest seed of the generator
_PENALTIES = (1e-6, 1e6)  # far beyond useful values; with any float32 as score the results are numbers
# The ranges of OpenAI's API.
_MOST_PENALTY, _MOST_BIAS = 2.0, 100.0
_MANY = 1024  # tokens; sorting fewer takes hardly any time


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling: how the next token is chosen.

    Attributes:
        temperature: 0 takes the most probable token, the one with the lowest id among equals.
        top_k: keeps the k most probable tokens; 0 keeps all, and so does -1, which becomes 0. A float without a
            fraction becomes an int.
        top_p: keeps the most probable tokens that have this probability together; 1 keeps all, 0 the most probable one.
        min_p: keeps tokens at least this share as probable as the most probable one; 0 keeps all.
        repetition_penalty: makes tokens that occurred less probable above 1; 1 changes nothing.
        seed: makes the choices repeatable.
        presence_penalty: is subtracted from the score of each token that was generated before; from -2 to 2.
        frequency_penalty: is subtracted as often as the token was generated before; from -2 to 2.
        logit_bias: what is added to the scores of tokens, from -100 to 100, by token id.

    Raises:
        RequestError: a value makes no sense.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        real_number("temperature", self.temperature, lambda value: value >= 0, "0 or more")
        object.__setattr__(self, "top_k", _checked_top_k(self.top_k))
        real_number("top_p", self.top_p, lambda value: 0 <= value <= 1, "from 0 to 1")
        real_number("min_p", self.min_p, lambda value: 0 <= value <= 1, "from 0 to 1")
        least, most = _PENALTIES
        must = f"from {least:f} to {most:.0f}"
        real_number("repetition_penalty", self.repetition_penalty, lambda value: least <= value <= most, must)
        if self.seed is not None:
            whole_number("seed", value=self.seed, least=0, most=_MOST, must="a whole number from 0 to 2^128 - 1")
        must = f"from -{_MOST_PENALTY:.0f} to {_MOST_PENALTY:.0f}"
        for name in ("presence_penalty", "frequency_penalty"):
            real_number(name, getattr(self, name), lambda value: abs(value) <= _MOST_PENALTY, must)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))


def _checked_top_k(given: object) -> int:
    """Return `top_k` as a whole number from 0 on. Raises RequestError.

    -1 is how vLLM and llama.cpp write that all tokens are kept, 0 how transformers does; 50.0 is what JSON writers make
    of 50 where all numbers are floats.
    """
    value = int(given) if isinstance(given, float) and given.is_integer() else given
    return max(whole_number("top_k", value, least=-1, most=_MOST, must="0 or -1 (off) or a positive integer"), 0)


class _CheckedBias(dict[int, float]):
    """A checked `logit_bias`. Parameters derived from others share it."""


def _checked_bias(bias: object) -> Mapping[int, float]:
    """Return a copy of `logit_bias`. Raises RequestError unless it maps token ids to numbers in their range."""
    if isinstance(bias, _CheckedBias):
        return bias
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be a mapping of token ids to numbers, not {shown(bias)}")
    must = f"from -{_MOST_BIAS:.0f} to {_MOST_BIAS:.0f}"
    return _CheckedBias(
        {
            whole_number("a token of logit_bias", value=token, least=0, most=2**31 - 1, must="a token id"): real_number(
                f"the logit_bias of token {token}", value, lambda value: abs(value) <= _MOST_BIAS, must
            )
            for token, value in bias.items()
        }
    )


class Sampler:
    """The sampler of one sequence, which remembers the tokens that occurred in it."""

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        """Make a sampler for a vocabulary of `vocab` tokens. Raises RequestError if an argument makes no sense."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"a sampler takes SamplingParams, not {shown(params)}")
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._vocab = whole_number("the vocabulary", vocab, 1, 2**31 - 1)
        self._changes = ScoreChanges(
            self._vocab,
            bias=params.logit_bias,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )

    def observe(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Note the tokens of a prompt for the repetition penalty. Raises RequestError unless they are token ids."""
        self._changes.note_prompt(token_ids(ids, self._vocab, least=0))

    def sample(self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None = None) -> int:
        """Choose the next token, note that it was generated, and return it.

        Args:
            logits: [vocab], or an engine's `Scores`. Of these it uses only the top logits if they suffice: with
                temperature 0 or top-k, and without a bias, a penalty or a mask. The token is the same as for all
                logits.
            allowed: which tokens may be chosen, bool [vocab]; None for all.

        Raises:
            RequestError: `logits` are not one number for each token, or no token is allowed.
            KernelError: they contain NaN, or rule out every token.
        """
        if self.params.temperature == 0:
            token = self._greedy(logits, allowed)
        else:
            token = _draw(*self._possible(logits, allowed), self._random.random())
        self._changes.note_chosen(token)
        return token

    def distribution(
        self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None = None
    ) -> tuple[Tokens, Probabilities]:
        """Return the tokens that may be chosen, int64 [n], ascending by probability, and their probabilities.

        These are float64 [n] and add up to 1. Takes and raises what `sample` does.
        """
        ids, probabilities = self._possible(logits, allowed)
        order = _ascending(ids, probabilities)
        return ids[order], probabilities[order]

    def _possible(
        self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None
    ) -> tuple[Tokens, Probabilities]:
        """Return the tokens that may be chosen and their probabilities, in any order."""
        params = self.params
        if params.temperature == 0:
            return np.array([self._greedy(logits, allowed)]), np.ones(1)
        ids, scores, highest = self._top_k(logits, allowed)
        # In place: with a large vocabulary, new memory takes longer than the arithmetic.
        if highest == np.inf:  # in the limit, only these tokens are possible, with equal probabilities
            weights = np.ones(len(ids))
        else:
            weights = scores.astype(np.float64)
            weights -= highest
            with np.errstate(over="ignore"):
                weights /= params.temperature
            np.exp(weights, out=weights)
        weights /= weights.sum()
        ids, probabilities = _top_p(ids, weights, params.top_p)
        probable = probabilities > 0
        if params.min_p:
            probable &= probabilities >= params.min_p * probabilities.max()
        if not probable.all():
            ids, probabilities = ids[probable], probabilities[probable]
        probabilities /= probabilities.sum()
        return ids, probabilities

    def _greedy(self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None) -> int:
        """Return the first token with the highest score."""
        known = self._known(logits, allowed)
        if known is not None:
            token, highest = known.highest
            check_highest(highest, logits)
            return token
        ids, _, token, _ = self._choices(logits, allowed)
        return token if ids is None else int(ids[token])

    def _top_k(
        self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None
    ) -> tuple[Tokens, NDArray[Any], float]:
        """Return the tokens that top-k keeps, ascending, or those with infinite scores; their scores; the highest."""
        top_k = int(self.params.top_k)
        if (known := self._known(logits, allowed)) is not None:
            _, highest = known.highest
            check_highest(highest, logits)
            found = known.at_least(highest) if highest == np.inf else known.top(top_k)
            if found is not None:
                return *found, highest
        ids, scores, _, highest = self._choices(logits, allowed)
        places = np.flatnonzero(scores == np.inf) if highest == np.inf else top_logits(scores, top_k)
        if len(places) < len(scores):
            scores = scores[places]
            ids = places if ids is None else ids[places]
        return places if ids is None else ids, scores, highest

    def _known(self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None) -> TopScores | None:
        """Return the top logits if they are known and nothing changes or masks them, else None."""
        if not isinstance(logits, Scores) or self._changes.are_any or allowed is not None:
            return None
        return logits.top_logits

    def _choices(
        self, logits: NDArray[Any] | Scores, allowed: NDArray[np.bool_] | None
    ) -> tuple[Tokens | None, NDArray[Any], int, float]:
        """Return the tokens that are left, ascending, None for all; their scores; place and score of the likeliest."""
        scores = self._scores(logits)
        place, highest = likeliest(scores)
        check_highest(highest, logits)
        if allowed is None:
            return None, scores, place, highest
        if not isinstance(allowed, np.ndarray) or allowed.shape != scores.shape or allowed.dtype != np.bool_:
            raise RequestError(f"allowed must be bool [{self._vocab}], one for each token, not {_described(allowed)}")
        ids = np.flatnonzero(allowed & (scores > -np.inf))
        if not len(ids):
            raise RequestError("no token is left to choose: every token that the model can choose is ruled out")
        scores = scores[ids]
        return ids, scores, *likeliest(scores)

    def _scores(self, logits: NDArray[Any] | Scores) -> NDArray[Any]:
        """Return the logits after bias and penalties, which do not change the array that was passed."""
        if isinstance(logits, Scores):
            logits = logits.logits()
        logits = self._checked(logits)
        if not self._changes.are_any and logits.dtype.kind == "f":
            return logits
        return self._changes.apply(logits)

    def _checked(self, logits: Any) -> NDArray[Any]:
        """Return the logits as an array [vocab] of numbers. Raises RequestError."""
        try:
            scores = np.asarray(logits)
        except Exception as error:  # whatever an object that is no list raises
            raise self._no_logits(logits) from error
        if scores.shape != (self._vocab,) or scores.dtype.kind not in "fiu":
            raise self._no_logits(scores)
        return scores

    def _no_logits(self, given: object) -> RequestError:
        return RequestError(f"logits must be {self._vocab} numbers, one for each token, not {_described(given)}")


def _described(given: object) -> str:
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else shown(given)


def likeliest(scores: NDArray[Any]) -> tuple[int, float]:
    """Return the first token with the highest score, and the score; NaN counts as the highest."""
    token = int(scores.argmax())  # the first NaN, if there is one
    return token, float(scores[token])


def check_highest(highest: float, logits: object = None) -> None:
    """Raise KernelError if scores contain NaN or are all minus infinity, given the highest of them.

    `logits` are what they were made of, which may know the reason.
    """
    if math.isnan(highest) or highest == -math.inf:
        kind = "contain NaN" if math.isnan(highest) else "rule out every token"
        reason = logits.reason() if isinstance(logits, Scores) and logits.reason is not None else None
        raise no_scores(kind, reason)


def no_scores(kind: str, reason: str | None) -> KernelError:
    """Return the error for logits of a `kind` that no token can be chosen by, and the reason if it is known."""
    if reason is not None:
        return CacheOverflowError(f"the model's logits {kind}: {reason}")
    return KernelError(f"the model's logits {kind}: its weights or the artifact's code are broken; try `verify`")


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
        part = np.flatnonzero(below)  # picking by number is several times as fast as by a mask
        of_part = probabilities[part]
        sum_below = float(of_part.sum())
        if share >= sum_below:
            share -= sum_below
            part = np.flatnonzero(~below)
            of_part = probabilities[part]
        ids, probabilities = ids[part], of_part
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
