"""Skipping what contributes little: neurons and inputs below limits, with no predictor, in models of any activation.

`sensitivities.py` measures how much the model's predictions depend on each neuron and each input, `limits.py` makes
limits of that, `search.py` finds the largest with which perplexity stays within a bound, and `calibration.py` does all
of this for one compilation and keeps the result.
"""

from picompile.skipping.calibration import checkpoint_limits
from picompile.skipping.limits import Limits, skipping_sites
from picompile.skipping.options import SkippingOptions

__all__ = ["Limits", "SkippingOptions", "checkpoint_limits", "skipping_sites"]
