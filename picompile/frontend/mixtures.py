"""Mixtures of experts of classes that do not ask transformers' registry, written as arithmetic over all experts."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from picompile.errors import UnsupportedModelError
from picompile.frontend.experts import check_rows, each_expert, summed_experts
from picompile_passes.passes.canonicalize.captured_experts import EXPERT_GAINS


def replace_mixtures(model: nn.Module) -> None:
    """Give the mixtures of `model` that ask no registry a forward of ours, in place; weights and names stay.

    Raises `UnsupportedModelError` for a mixture whose options ours does not have, and for attention that is one.
    """
    for module in model.modules():
        cls: Any = type(module)
        if cls.__name__ == "JetMoeMoA":
            raise UnsupportedModelError(
                "JetMoeAttention is a mixture itself: a router chooses each token's queries, which is not supported"
            )
        if cls.__module__.startswith("transformers.models.") and (known := _MIXTURES.get(cls.__name__)) is not None:
            prepare, forward = known
            prepare(module)
            # A class, and not an attribute: modules with attributes of their own would be of as many kinds.
            module.__class__ = _with_forward(cls, forward)


@cache
def _with_forward(cls: Any, forward: Any) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"forward": forward})


def _prepare_llama4(module: Any) -> None:
    if module.top_k != 1:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {module.top_k}; of Llama 4, which scales what an expert is given and "
            "not what it gives, 1 alone is supported"
        )
    check_rows(module, module.experts.gate_up_proj.transpose(1, 2))
    module.register_buffer("ones", torch.ones(1, module.num_experts), persistent=False)


def _llama4(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """`Llama4TextMoe`: hidden states [..., D] → [T, D], and the router's logits [T, G].

    A token has one expert, which is given the token times its score: so the token is scaled before all experts, and the
    expert's own gain is 1. The score is the sum of all scores, which are 0 but for the chosen expert's.
    """
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    score, index = scores.topk(1, dim=-1)
    experts, count = module.experts, module.num_experts
    scale = nn.functional.linear(EXPERT_GAINS(index, score, count), module.ones)
    gate, up = each_expert(x * scale, experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    gains = EXPERT_GAINS(index, torch.ones_like(score), count)
    routed = summed_experts(experts.act_fn(gate) * up, gains, experts.down_proj.transpose(1, 2))
    return module.shared_expert(x) + routed, logits


def _prepare_dbrx(module: Any) -> None:
    check_rows(module, module.mlp.w1.unflatten(0, (module.num_experts, -1)))


def _dbrx(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`DbrxExperts`, whose three matrices are [G · S, D]: hidden states [B, T, D] → [B, T, D]."""
    x, mlp, experts = hidden_states.reshape(-1, module.hidden_size), module.mlp, module.num_experts
    gains = EXPERT_GAINS(top_k_index, top_k_weights, experts)
    gate, up = (each_expert(x, rows.unflatten(0, (experts, -1))) for rows in (mlp.w1, mlp.v1))
    hidden = mlp.activation_fn(gate) * up * gains.unsqueeze(-1)
    return nn.functional.linear(hidden.flatten(-2), mlp.w2.t()).reshape(hidden_states.shape)


_MIXTURES: dict[str, tuple[Callable[[Any], None], Callable[..., Any]]] = {
    "DbrxExperts": (_prepare_dbrx, _dbrx),
    "Llama4TextMoe": (_prepare_llama4, _llama4),
}
