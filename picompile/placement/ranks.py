"""Ranks of predictors that have not been trained yet."""

from picompile.placement.firing import Firing


def estimate_rank(hidden: int, neurons: int, layer_parameters: float, firing: Firing | None = None) -> int:
    """The rank that a learned predictor of a block of `neurons` neurons may get, the same in all layers.

    It is the rank that training starts from where as many neurons fire as `firing` says, in the mean of its layers, but
    no more than what fits training's budget: a share of the parameters of the model, here of `layer_parameters`, which
    are a layer's with its part of the rest. Without `firing`, the budget decides.
    """
    from picompile.training.candidates import round_rank, start_rank
    from picompile.training.options import TrainOptions

    most = max(1, int((TrainOptions().budget * layer_parameters - neurons) // (hidden + neurons)))
    if firing is not None:
        most = min(most, start_rank(hidden, neurons, *_mean_firing(firing)))
    rounded = round_rank(most, min(hidden, neurons))
    step = 32 if rounded >= 256 else 8
    return rounded if rounded <= most else max(1, rounded - step)


def _mean_firing(firing: Firing) -> tuple[float, float]:
    """The share that fires, and the share of firings that the most active fifth of a layer's neurons has."""
    shares = [layer.shares for layer in firing.layers]
    top = sum(float(of_layer[: max(1, len(of_layer) // 5)].sum()) for of_layer in shares)
    total = sum(float(of_layer.sum()) for of_layer in shares)
    return total / sum(map(len, shares)), top / max(total, 1e-30)
