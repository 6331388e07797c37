"""Our experts in transformers' registry: a mixture arrives in the captured graph as arithmetic over all experts.

transformers' own loops over the experts that were chosen, and a graph cannot say how many. Ours computes every neuron
of every expert, times the gain of its expert, which is 0 for those that were not chosen: the sum is the same, and
passes raise it to one feed-forward block that computes the chosen experts alone. It is registered under a name of our
own, which only the models that we build here are told to use. A class that asks no registry keeps its own loop, which
cannot be captured, unless `mixtures.py` has it.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from picompile.errors import UnsupportedModelError
from picompile_passes.passes.canonicalize.captured_experts import EXPERT_GAINS

EXPERTS_NAME = "picompile"

# Rows of gate and up of all experts of a layer: three times what the largest models have. Some tables of them are
# computed while a model is captured.
_MOST_ROWS = 1 << 22
_ROUTER_BIASES = frozenset({"e_score_correction_bias", "expert_bias"})


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts as transformers calls them: hidden states [T, D], chosen experts and weights [T, k] → [T, D].

    `module` has what transformers' `use_experts_implementation` gives it, and the stacks of its experts: `gate_up_proj`
    or `up_proj`, and `down_proj`. Raises `UnsupportedModelError` for experts that are more than that.
    """
    _check(module)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name), module.down_proj
    # Rows of an expert's matrix are what it computes: [G, N, D] and [G, D, S].
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    check_rows(module, up)
    bias = getattr(module, f"{name}_bias").flatten() if module.has_bias else None
    gains = EXPERT_GAINS(top_k_index, top_k_weights.to(hidden_states.dtype), up.shape[0])
    hidden = each_expert(hidden_states, up, bias)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    result = summed_experts(hidden, gains, down)
    return result + gains @ module.down_proj_bias if module.has_bias else result


def each_expert(hidden_states: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what the matrices of all experts make of hidden states: [T, D], rows [G, N, D] → [T, G, N]."""
    hidden = F.linear(hidden_states, rows.flatten(0, 1), bias)
    return hidden.reshape(*hidden.shape[:-1], rows.shape[0], -1)


def summed_experts(hidden: Tensor, gains: Tensor, down: Tensor) -> Tensor:
    """Return the sum of all experts' results, each times its gain: hidden [T, G, S], down [G, D, S] → [T, D]."""
    return F.linear((hidden * gains.unsqueeze(-1)).flatten(-2), down.transpose(0, 1).flatten(1))


def check_rows(module: nn.Module, rows: Tensor) -> None:
    """Refuse experts whose gate and up, or one of these, have more rows [G, N, D] than a graph can have tables of."""
    if (count := rows.shape[0] * rows.shape[1]) > _MOST_ROWS:
        raise UnsupportedModelError(f"{type(module).__name__}: {count:,} rows of gate and up; {_MOST_ROWS:,} at most")


def _check(module: Any) -> None:
    """Refuse experts with parts that the block of the dialect has not."""
    name = type(module).__name__
    if module.has_post_expert_norm:
        raise UnsupportedModelError(f"{name} normalizes what each expert gives, which is not supported")
    known = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    if module.has_bias:
        known |= {f"{part}_bias" for part in known}
    if others := sorted({path for path, _ in module.named_parameters()} - known):
        raise UnsupportedModelError(f"{name} has {others[0]} besides its experts' matrices, which is not supported")


def keep_router_biases(model: nn.Module) -> None:
    """Make parameters of the biases that routers choose experts by, in place.

    Most classes have them as buffers, since nothing trains them by gradients: but a checkpoint has their values.
    """
    for module in model.modules():
        for name in sorted(_ROUTER_BIASES & module._buffers.keys() - module._non_persistent_buffers_set):
            bias = module._buffers.pop(name)
            if bias is not None:
                module.register_parameter(name, nn.Parameter(bias, requires_grad=False))


def register_experts() -> None:
    """Put the function into transformers' registry; again has no effect."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
