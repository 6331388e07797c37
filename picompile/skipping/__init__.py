"""Skipping what contributes little: neurons below limits, with no predictor, in models of any activation.

`sensitivities.py` measures how much the model's predictions depend on each neuron, `limits.py` makes
limits of that, `search.py` finds the largest with which perplexity stays within a bound, and `calibration.py` does all
of this for one compilation and keeps the result.
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.skipping.calibration import checkpoint_limits
    from picompile.skipping.limits import Limits, SkippingSites, skipping_sites
    from picompile.skipping.options import SkippingOptions

__all__ = ["Limits", "SkippingOptions", "SkippingSites", "checkpoint_limits", "skipping_sites"]

# Imported on first use: most of it needs torch.
_HOME = {
    "Limits": "picompile.skipping.limits",
    "SkippingOptions": "picompile.skipping.options",
    "SkippingSites": "picompile.skipping.limits",
    "checkpoint_limits": "picompile.skipping.calibration",
    "skipping_sites": "picompile.skipping.limits",
}

__getattr__ = lazy(__name__, _HOME)
