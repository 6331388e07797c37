"""Tells which activations silence neurons, by their text in a graph. This file imports no torch.

`dialect/activations.py` has the functions themselves.
"""

# These are exactly zero for every input at or below 0; `fatrelu(T)` is for every input at or below T.
SPARSE_ACTIVATIONS = ("relu", "relu2", "relu6")


def silences_neurons(activation: str) -> bool:
    """Return whether `activation`, as a graph names it (`relu`, `fatrelu(0.01)`), leaves neurons exactly zero."""
    return activation in SPARSE_ACTIVATIONS or activation.startswith("fatrelu(")
