"""The distance of an artifact from its checkpoint, with a line for each lossy part."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile.intervals import Estimate


@dataclass(frozen=True)
class VariantAccuracy:
    """The distance from the checkpoint with all lossy parts up to one, `part`.

    Attributes:
        part: weights, thresholds, predictors, kv_cache or runtime.
        title: the part in words.
        remedy: what loses less there; empty where there is nothing.
        perplexity: on the text.
        relative_change: of the perplexity, against the checkpoint's.
        kl: the mean KL divergence of the next-token distributions, KL(checkpoint || variant), in nats.
        same_top: the share of tokens for which both have the same likeliest token.
        added_change: how much more `relative_change` is than on the line before.
        added_kl: how much more `kl` is than on the line before.
    """

    part: str
    title: str
    remedy: str
    perplexity: float
    relative_change: Estimate
    kl: Estimate
    same_top: float
    added_change: float
    added_kl: float

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the artifact's report."""
        return {
            "part": self.part,
            "title": self.title,
            "perplexity": finite(self.perplexity),
            "relative_change": finite(self.relative_change.value),
            "relative_change_interval": _interval(self.relative_change),
            "added_change": finite(self.added_change),
            "kl_nats": finite(self.kl.value),
            "kl_nats_interval": _interval(self.kl),
            "added_kl_nats": finite(self.added_kl),
            "same_top_share": self.same_top,
        }


@dataclass(frozen=True)
class CheckpointComparison:
    """The accuracy of an artifact against its checkpoint.

    Attributes:
        bound: the share by which perplexity may rise; None for any.
        perplexity: the checkpoint's, in float32 with every neuron.
        tokens: how many tokens were predicted.
        text: where the text is from.
        lines: one for each lossy part, each with all parts before it. The last one is the artifact.
    """

    bound: float | None
    perplexity: float
    tokens: int
    text: str
    lines: tuple[VariantAccuracy, ...]

    @property
    def met(self) -> bool:
        """Whether the artifact's perplexity is within the bound; a perplexity that is not a number is not."""
        return self.bound is None or self.lines[-1].relative_change.value <= self.bound

    @property
    def worst(self) -> VariantAccuracy:
        """The part that adds most to the perplexity."""
        return max(self.lines, key=lambda line: line.added_change)

    @property
    def refusal(self) -> str:
        """The message for an artifact that does not meet its bound."""
        change, worst = self.lines[-1].relative_change, self.worst
        if change.low is None or change.high is None:
            interval = f" ({self.tokens:,} tokens, too few for an interval: read more with --check-tokens)"
        else:
            interval = f" (95 %: {_range(change.low, change.high)})"
        parts = ", ".join(f"{line.title} {signed(line.added_change)}" for line in self.lines)
        remedy = f"choose {worst.remedy}, or allow" if worst.remedy else "allow"
        return (
            f"the perplexity is {signed(change.value)} against the checkpoint's{interval}, more than "
            f"{100 * (self.bound or 0):.3g} %; most is lost by {worst.title} ({parts}); {remedy} more with "
            "--checkpoint-bound"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the artifact's report: the figures of the whole artifact, and of each line."""
        whole = self.lines[-1].to_json()
        kept = ("perplexity", "relative_change", "relative_change_interval", "kl_nats", "kl_nats_interval")
        return {
            "bound": self.bound,
            "checkpoint_perplexity": finite(self.perplexity),
            **{key: whole[key] for key in (*kept, "same_top_share")},
            "tokens": self.tokens,
            "text": self.text,
            "lines": [line.to_json() for line in self.lines],
        }


def perplexity_of(nll: NDArray[np.float64]) -> float:
    """Return the perplexity of negative log-likelihoods [tokens]; infinite if it is too large for a float."""
    mean = float(nll.mean())
    return math.exp(mean) if mean < 709 else math.inf


def signed(share: float) -> str:
    """Return a relative change as text: `+1.23 %`, `-0.04 %`."""
    return f"{100 * share:+.2f} %"


def _range(low: float, high: float) -> str:
    return f"{100 * low:+.2f} to {100 * high:+.2f} %"


def finite(value: float | None) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def _interval(estimate: Estimate) -> list[float | None] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [finite(estimate.low), finite(estimate.high)]
