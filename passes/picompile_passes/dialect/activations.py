"""Activation functions by name: the eager definition, and whether they silence neurons.

An activation is written `relu` or, with a parameter, `fatrelu(0.01)`. Graphs carry this text as an attribute.
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
    there contributes nothing and may be skipped without loss.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    sparse: bool = False
    threshold: float = 0.0

    @property
    def text(self) -> str:
        """The text that a graph carries, which `parse_activation` reads back."""
        return f"{self.name}({self.threshold!r})" if self.name == "fatrelu" else self.name


def _fatrelu(threshold: float) -> Activation:
    # ProSparse (arXiv 2402.13516): f(x) = x for x > t, else 0.
    return Activation("fatrelu", lambda x: torch.where(x > threshold, x, torch.zeros_like(x)), True, threshold)


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

_WITH_PARAMETER = re.compile(r"fatrelu\((?P<threshold>[^()]+)\)")


def parse_activation(text: str) -> Activation:
    """Return the activation that `text` names. Raises `ValueError` for an unknown one."""
    if text in ACTIVATIONS:
        return ACTIVATIONS[text]
    match = _WITH_PARAMETER.fullmatch(text)
    if match is None:
        known = ", ".join([*ACTIVATIONS, "fatrelu(THRESHOLD)"])
        raise ValueError(f"unknown activation {text!r}; known are {known}")
    return _fatrelu(float(match["threshold"]))
