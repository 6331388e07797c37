"""Calibrated rounding: weights are rounded layer by layer, so that errors on calibration text compensate each other.

`compensate.py` rounds one matrix, given the second moments of its inputs. `matrices.py` finds the matrices of a graph
and gathers these moments, `run.py` goes through the layers of a model, and `store.py` keeps the results.

The format of each matrix may be chosen for a budget of bits: `losses.py` measures each matrix's loss, and `budget.py`
spends the bits. `calibration.py` does all of this for one compilation.
"""

from picompile.rounding.calibration import checkpoint_formats, round_checkpoint
from picompile.rounding.run import round_model
from picompile.rounding.store import RoundedWeights, RoundingDirectory

__all__ = [
    "RoundedWeights",
    "RoundingDirectory",
    "checkpoint_formats",
    "round_checkpoint",
    "round_model",
]
