"""Activation functions by name: the eager definition, and whether they silence neurons.

An activation is written `relu` or, with parameters, `fatrelu(0.01)` or `clamped_swish(7.0,1.702)`. Graphs carry this
text as an attribute.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """One activation function.

    Where it is `sparse`, its output is exactly zero for every input at or below `threshold`: a neuron whose gate stays
    there contributes nothing and may be skipped without loss. `parameters` are the numbers in its text.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    sparse: bool = False
    threshold: float = 0.0
    parameters: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """The text that a graph carries, which `parse_activation` reads back."""
        return f"{self.name}({','.join(map(repr, self.parameters))})" if self.parameters else self.name


def _fatrelu(threshold: float) -> Activation:
    # ProSparse (arXiv 2402.13516): f(x) = x for x > t, else 0.
    def function(x: Tensor) -> Tensor:
        return torch.where(x > threshold, x, torch.zeros_like(x))

    return Activation("fatrelu", function, True, threshold, (threshold,))


def _clamped_swish(limit: float, beta: float) -> Activation:
    # The gate of gpt-oss: c · sigmoid(beta · c) with c = min(x, limit).
    def function(x: Tensor) -> Tensor:
        clamped = x.clamp(max=limit)
        return clamped * torch.sigmoid(beta * clamped)

    return Activation("clamped_swish", function, parameters=(limit, beta))


def _clamped_linear(limit: float, shift: float) -> Activation:
    # gpt-oss multiplies the gate with this: x within ± limit, plus shift.
    return Activation("clamped_linear", lambda x: x.clamp(-limit, limit) + shift, parameters=(limit, shift))


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("identity", lambda x: x.clone()),
        Activation("relu", F.relu, True),
        Activation("relu2", lambda x: F.relu(x) ** 2, True),
        Activation("relu6", F.relu6, True),
        Activation("silu", F.silu),
        Activation("gelu", F.gelu),
        Activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        Activation("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
        Activation("sigmoid", torch.sigmoid),
        Activation("tanh", torch.tanh),
    )
}

PARAMETRIC: dict[str, tuple[tuple[str, ...], Callable[..., Activation]]] = {
    "fatrelu": (("THRESHOLD",), _fatrelu),
    "clamped_swish": (("LIMIT", "BETA"), _clamped_swish),
    "clamped_linear": (("LIMIT", "SHIFT"), _clamped_linear),
}
"""The activations with parameters, by name: what the parameters are called, and what makes one of them."""

_WITH_PARAMETERS = re.compile(r"(?P<name>\w+)\((?P<parameters>[^()]+)\)")


def parse_activation(text: str) -> Activation:
    """Return the activation that `text` names. Raises `ValueError` for an unknown one."""
    if text in ACTIVATIONS:
        return ACTIVATIONS[text]
    match = _WITH_PARAMETERS.fullmatch(text)
    if match is not None and match["name"] in PARAMETRIC:
        names, make = PARAMETRIC[match["name"]]
        parameters = tuple(map(float, match["parameters"].split(",")))
        if len(parameters) == len(names):
            return make(*parameters)
    forms = (f"{name}({','.join(names)})" for name, (names, _) in PARAMETRIC.items())
    raise ValueError(f"unknown activation {text!r}; known are {', '.join([*ACTIVATIONS, *forms])}")
