"""The gate on accuracy: what predictors cost, measured on held-out text, and what happens where it is too much.

A lossy predictor leaves out neurons that would have fired. The gate bounds how much that may raise the perplexity: the
same artifact reads the same text twice, once with every neuron and once as it generates, so that nothing but the
predictors makes the difference.
"""

from picompile.gate.accuracy import LayerAccuracy, measure_layers
from picompile.gate.check import GateResult, check_artifact
from picompile.gate.windows import first_windows

__all__ = ["GateResult", "LayerAccuracy", "check_artifact", "first_windows", "measure_layers"]
