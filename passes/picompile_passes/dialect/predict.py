"""`predict`: which neurons of a block will fire."""

from typing import Any

import torch
from torch import Tensor

from picompile_passes.dialect.neurons import neuron_gains
from picompile_passes.dialect.operator import operator
from picompile_passes.predictors import predictor_kind


def _mask(x: Tensor, weights: list[Tensor], kind: str, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], predictor_kind(kind).neurons(weights)), dtype=torch.bool)


@operator(part="mask", dimensions={"x": "TD", "gains": "TG"}, result=_mask, packed=("weights",), forms=("sparse",))
def predict(x: Tensor, weights: list[Tensor], kind: str, threshold: float, gains: Tensor | None = None) -> Tensor:
    """mask = kind(x, weights) > threshold: the neurons predicted to fire, bool [T, F]. x [T, D].

    `kind` is one of `picompile_passes.predictors`; it defines what the weights are, and what the threshold is compared
    with. With `gains` [T, G] of a block of experts (see `ffn`), the mask names no neuron of an expert whose gain is 0,
    and none of these is predicted. The mask becomes kernel arguments in picompile_codegen's `lowering/ffn.py`.
    """
    mask = predictor_kind(kind).evaluate(x, weights, threshold)
    return mask if gains is None else mask & (neuron_gains(gains, mask.shape[-1]) != 0)
