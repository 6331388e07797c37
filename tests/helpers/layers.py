"""A random layer and samples that look a little like those of a model: few directions matter, few neurons fire."""

import torch
from torch import Tensor

from picompile.predictors.firing import FiringRule
from picompile.predictors.train.data import LayerData, Norm, Samples


def random_layer(
    seed: int,
    *,
    samples: int = 600,
    hidden: int = 37,
    neurons: int = 91,
    gated: bool = True,
    activation: str = "relu",
    up_activation: str = "identity",
    biased: bool = False,
    norm: str | None = "rms_norm",
    threshold: float = 0.0,
    by: str = "magnitude",
    previous: bool = False,
    spread: float = 0.9,
    norm_eps: float | None = None,
    experts: int = 0,
) -> LayerData:
    """`spread` below 1 lets the directions of the input fall off, so that small ranks tell a lot.

    Of `experts`, a token chooses two; their gains depend on the input.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    scales = spread ** torch.arange(hidden)
    rotation = torch.linalg.qr(normal(hidden, hidden)).Q
    values = ((normal(samples, hidden) * scales + 0.1) @ rotation).half()
    weights = {name: normal(neurons, hidden) for name in ("gate", "up", "down")}
    biases = {name: normal(neurons) * 0.3 - 0.5 if biased else None for name in ("gate_bias", "up_bias")}
    made = None
    if norm is not None:
        made = Norm(norm, 1e-5, 1 + 0.2 * normal(hidden), 0.1 * normal(hidden) if norm == "layer_norm" else None)
    gains = None
    if experts:
        scores = (values.float() @ normal(hidden, experts)).softmax(-1)
        gains = torch.where(scores >= scores.topk(2).values[:, 1:], scores, 0.0).half()
    return LayerData(
        layer=3,
        samples=Samples(values, made),
        previous=Samples((values + 0.5 * normal(samples, hidden)).half(), made) if previous else None,
        gate=weights["gate"] if gated else None,
        up=weights["up"],
        down=weights["down"],
        gate_bias=biases["gate_bias"] if gated else None,
        up_bias=biases["up_bias"],
        activation=activation,
        up_activation=up_activation,
        rule=FiringRule(threshold, by),
        norm_eps=norm_eps,
        gains=gains,
    )
