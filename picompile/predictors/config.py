"""The options of a compilation that concern its predictors."""

import math
from dataclasses import dataclass
from pathlib import Path

from picompile.choices import PREDICTORS
from picompile.errors import UsageError
from picompile.frontend.activation import ACTIVATION
from picompile.options import option
from picompile.predictors.profile.text import CALIBRATION, CalibrationText
from picompile.quantities import parse_checked_bound


def _check_predictor(kind: str) -> None:
    """Raise `UsageError` unless `kind` is one of ours or of a plug-in.

    A plug-in's kind with weights of its own is none of them: it comes with the folder that holds them.
    """
    if kind in PREDICTORS:
        return
    from picompile_passes.predictors import PREDICTOR_KINDS

    others = [name for name in PREDICTOR_KINDS if name not in PREDICTORS]
    known = (*PREDICTORS, *(name for name in others if PREDICTOR_KINDS[name].parameters is None))
    if kind not in known:
        raise UsageError(f"unknown predictor {kind!r}; known are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class PredictorOptions:
    """Options of a model's predictors: their kind, their training text, and the perplexity that they may cost."""

    activation: str | None = ACTIVATION.field(None)
    predictor: str | None = option(
        None,
        "Method used to predict active neurons. exact: from the gating matrix, computed in full; lossless, ReLU family "
        "only. learned: a small trained predictor for each layer. sign: the signs of the weights. none: compute every "
        "neuron. Or a plug-in's kind. Default: exact where neurons can be silent, else none.",
        metavar="KIND",
        check=_check_predictor,
        common=True,
    )
    predictors: Path | None = option(
        None, "Take the predictors that train or import-predictors made. Default: train them.", metavar="FOLDER"
    )
    profile: Path | None = option(
        None, "Train predictors and plan with this profile. Default: make one.", metavar="FOLDER"
    )
    calibration: tuple[Path | CalibrationText, ...] = CALIBRATION.field(())
    accuracy_bound: float | None = option(
        "0.1%",
        "How far predictors may raise the perplexity on held-out text. report: measure, and allow any. off: measure "
        "nothing.",
        metavar="SHARE",
        parse=parse_checked_bound,
        least=0,
        aliases=("--gate",),
    )
    check_tokens: int = option(
        4096,
        "Tokens of held-out text that the accuracy check reads, at most.",
        metavar="N",
        least=2,
        aliases=("--gate-tokens",),
    )
    work: Path | None = option(
        None,
        "Keep the profile, the predictors and rounded weights here, and continue from what is there.",
        metavar="DIR",
        common=True,
    )

    @property
    def kind(self) -> str:
        """The predictor's kind. `auto` where it depends on a model that is not known yet."""
        return self.predictor or "auto"

    @property
    def is_lossless(self) -> bool:
        """Whether every firing neuron is computed, so that nothing needs training or checking."""
        from picompile_passes.predictors import predictor_kind

        return self.predictor is None or predictor_kind(self.predictor).lossless

    @property
    def is_checked(self) -> bool:
        """Whether the perplexity with predictors is measured."""
        return self.accuracy_bound is not None

    @property
    def finite_bound(self) -> float | None:
        """The share by which the perplexity may rise; None for no bound."""
        return None if self.accuracy_bound is None or math.isinf(self.accuracy_bound) else self.accuracy_bound
