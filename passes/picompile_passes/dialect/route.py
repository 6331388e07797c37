"""`route`: a router's choice of experts, and how much each of them counts for a token."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.operator import Call, operator

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    # DeepSeek V4.
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}
"""The scores that a router makes of its logits, by name."""

NORMALIZED = ("none", "sum", "softmax", "sigmoid", "sigmoid_sum", "sparse_mixer")
"""The ways to make weights of the chosen scores: as they are, over their sum, by a softmax, by a sigmoid, or sigmoids
over their sum; or, of experts that are drawn one after the other, by a softmax over those that are left and near the
best (PhiMoE)."""

GROUP_SCORES = ("max", "top2")
"""The score of a group of experts: that of its best expert, or the sum of those of its two best."""


def _is_a_rule(call: Call) -> Iterator[str]:
    """Names are those of a rule, and as many experts can be chosen as it says."""
    values, experts = call.values, call.columns("logits")
    for name, known in (("scores", SCORES), ("normalized", NORMALIZED), ("group_score", GROUP_SCORES)):
        if values[name] not in known:
            yield f"its {name} is {values[name]!r}, not one of {', '.join(known)}"
    groups, chosen_groups = values["groups"], values["chosen_groups"]
    if groups < 1 or experts % groups or not 1 <= chosen_groups <= groups:
        yield f"it chooses {chosen_groups} of {groups} groups of {experts} experts"
    elif not 1 <= values["chosen"] <= experts // groups * chosen_groups:
        yield f"it chooses {values['chosen']} of {experts // groups * chosen_groups} experts"
    elif values["group_score"] == "top2" and groups > 1 and experts // groups < 2:
        yield "its groups have one expert each, and no second best"
    is_plain = values["bias"] is None and chosen_groups == groups
    if values["normalized"] == "sparse_mixer" and not is_plain:
        yield "draws experts by other numbers than their scores"


@operator(
    part="router",
    dimensions={"logits": "TG", "bias": "G", "expert_scale": "G"},
    result="TG",
    checks=(_is_a_rule,),
)
def route(
    logits: Tensor,
    bias: Tensor | None,
    expert_scale: Tensor | None,
    chosen: int,
    scores: str,
    normalized: str,
    scale: float = 1.0,
    eps: float = 0.0,
    groups: int = 1,
    chosen_groups: int = 1,
    group_score: str = "max",
) -> Tensor:
    """gains[t, e] = scale · expert_scale[e] · w[t, e] for the `chosen` best experts of token t, 0 for the others.

    s = scores(logits), and the best experts are those with the highest s + bias; of equal ones, the first. w is s, s /
    (Σ s + eps), softmax(s), sigmoid(s) or sigmoid(s) / (Σ sigmoid(s) + eps), over the chosen experts, as `normalized`
    says. With `groups`, only experts of the `chosen_groups` best groups are chosen: equal runs of experts, compared by
    the highest s + bias in each, or by the sum of the two highest (DeepSeek V3, arXiv 2412.19437). An expert whose gain
    is 0 is not computed.

    With `sparse_mixer` (arXiv 2409.12136), w of an expert is its softmax over the scores of all that are not chosen
    before it, and not far below it: with m its score, those with (m - s) / max(|s|, m) > eps are left out. Such a
    router has neither a bias nor groups.

    logits [T, G]; bias, expert_scale [G] → [T, G].
    """
    score = SCORES[scores](logits)
    choice = score if bias is None else score + bias
    if chosen_groups < groups:
        grouped = choice.reshape(*choice.shape[:-1], groups, -1)
        best = grouped.topk(1 if group_score == "max" else 2, dim=-1).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, _best(best, chosen_groups), False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = _best(choice, chosen)
    weights = score.gather(-1, experts)
    if normalized == "softmax":
        weights = weights.softmax(-1)
    elif normalized in ("sigmoid", "sigmoid_sum"):
        weights = weights.sigmoid()
    elif normalized == "sparse_mixer":
        weights = _drawn(score, experts, eps)
    if normalized in ("sum", "sigmoid_sum"):
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    gains = torch.zeros_like(logits).scatter(-1, experts, weights * scale)
    return gains if expert_scale is None else gains * expert_scale


def _drawn(score: Tensor, experts: Tensor, eps: float) -> Tensor:
    """Return the weights of `experts` [T, chosen], the best of `score` [T, G], that are drawn one after the other."""
    weights, left = [], score
    for expert in experts.unbind(-1):
        own = expert.unsqueeze(-1)
        best = score.gather(-1, own)
        far = (best - score) / score.abs().maximum(best) > eps
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, own))
        left = left.scatter(-1, own, -torch.inf)
    return torch.cat(weights, dim=-1)


def _best(values: Tensor, count: int) -> Tensor:
    """Return the numbers of the `count` highest values of each row; of equal values, the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
