"""Masks of scaled dot product attention as the dialect has them: causal, maybe with a window and with slopes."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import is_call
from picompile_passes.passes.canonicalize.forms import Forms

_aten = torch.ops.aten

_RESHAPES = (_aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default, _aten.view.default, _aten.reshape.default)

# A mask is evaluated for this many tokens, or for as many as the graph takes: one more than the widest window in use
# (Mistral's 4096), to tell it from none.
MASK_TOKENS = 4097
# What differs from head to head may have so many elements: 1 GiB.
_MOST_ELEMENTS = 2**28
# Masks may hide with a large negative number instead of infinity, to which a bias may be added.
_HIDDEN = -5e8
# Positions times slopes are rounded, and then subtracted: so many times the rounding error of the largest, and no more
# than would hardly be seen in a weight.
_ROUNDINGS = 4
_MOST_ERROR = 0.01


@dataclass(frozen=True)
class VisibleSpan:
    """A mask: a token sees the last `window` tokens, 0 for all. Scores fall by `slopes` [heads] a token, if any."""

    window: int
    slopes: Tensor | None


def read_mask(forms: Forms, node: Node, mask: Node | None, is_causal: bool) -> VisibleSpan:
    """Return what the mask of attention `node` stands for. Raises `UnsupportedGraphError` for one of another form.

    A mask that is a sum is read summand by summand: what differs from head to head is mostly small then.
    """
    if mask is None and is_causal:
        return VisibleSpan(0, None)
    if mask is None or is_causal or not forms.is_known(mask):
        raise UnsupportedGraphError(f"{node.name} ({node.target}): only causal attention is supported")
    heads = int(node.meta["val"].shape[-3])
    parts = [_by_head(forms, summand, heads) for summand in _summands(mask)]
    # What depends on the key alone, [heads, 1, T], is checked without making a square for each head of it.
    rows = [part for part in parts if part.shape[0] > 1 and part.shape[1] == 1]
    squares = [part for part in parts if part.shape[0] == 1 or part.shape[1] > 1]
    found = [_width_and_slope(mask, scores.expand(forms.tokens, -1)) for scores in _summed(squares)]
    widths = {width for width, _ in found}
    if len(widths) != 1:
        raise _other(mask)
    (width,) = widths
    slopes = torch.tensor([slope for _, slope in found]).expand(heads)
    if rows:
        slopes = slopes + torch.tensor([_slope(mask, scores[0]) for scores in _summed(rows)])
    window = 0 if width == forms.tokens else width
    # A token that sees itself alone gives it all weight.
    matter = width > 1 and bool(slopes.any())
    return VisibleSpan(window, slopes.to(torch.float32).clone() if matter else None)


def _summands(mask: Node) -> Iterator[Node]:
    """The values that `mask` is the sum of; `mask` itself where it is none.

    Dimensions of 1 in front, which say nothing, may come and go on the way.
    """
    while mask.target in _RESHAPES and _sizes(mask) == _sizes(mask.all_input_nodes[0]):
        mask = mask.all_input_nodes[0]
    if is_call(mask, _aten.add.Tensor) and not mask.kwargs and all(_is_float(part) for part in mask.args):
        for part in mask.args:
            yield from _summands(part)  # type: ignore[arg-type]
    else:
        yield mask


def _sizes(node: Node) -> list[str]:
    """The sizes of a value without the ones in front, as texts: symbols are compared as they are written."""
    sizes = [str(size) for size in node.meta["val"].shape]
    return list(itertools.dropwhile(lambda size: size == "1", sizes))


def _is_float(value: object) -> bool:
    return isinstance(value, Node) and bool(value.meta["val"].is_floating_point())


def _summed(parts: list[Tensor]) -> Iterator[Tensor]:
    """Yield the sum of `parts` [heads or 1, T or 1, T] for each head, once where all heads have the same."""
    for head in range(max(map(len, parts), default=0)):
        first, *others = (part[min(head, len(part) - 1)] for part in parts)
        yield sum(others, first)


def _by_head(forms: Forms, mask: Node, heads: int) -> Tensor:
    """Return what `mask` adds to scores: float32 [heads or 1, T or 1, T]."""
    shape: list[Any] = [1, 1, *mask.meta["val"].shape]
    lead, rows = shape[:-2], shape[-2]
    if any(isinstance(size, torch.SymInt) for size in lead) or lead[-1] not in (1, heads) or math.prod(lead[:-1]) != 1:
        raise _other(mask)
    elements = lead[-1] * forms.tokens * (forms.tokens if isinstance(rows, torch.SymInt) else rows)
    if elements > _MOST_ELEMENTS and lead[-1] > 1 and not is_call(mask, _aten.expand.default):
        raise UnsupportedGraphError(
            f"{mask.name} ({mask.target}): a mask of {heads} heads is too large to compare for {forms.tokens} tokens: "
            f"add what differs from head to head, [heads, 1, tokens], to a causal mask [tokens, tokens]"
        )
    value: Tensor = forms.known(mask)
    value = value[(None,) * max(0, 3 - value.dim())]
    value = value[(0,) * (value.dim() - 3)].expand(-1, -1, forms.tokens)
    # The same for every head, written out.
    value = value[:1] if value.stride(0) == 0 else value
    return torch.where(value, 0.0, -math.inf) if value.dtype == torch.bool else value.to(torch.float32)


def _width_and_slope(mask: Node, scores: Tensor) -> tuple[int, float]:
    """Return how many tokens a token sees, and how much `scores` [T, T] rise from each of them to the next.

    What all scores of a token have in common makes no difference.
    """
    visible, tokens = scores > _HIDDEN, len(scores)
    width = int(visible[-1].sum())
    expected = torch.ones(tokens, tokens, dtype=torch.bool).tril_().triu_(1 - width)
    if not torch.equal(visible, expected) or bool(scores.isnan().any()):
        raise _other(mask)
    bias = torch.where(visible, scores, 0.0)
    if not bool(bias.any()):
        return width, 0.0
    slope = _slope(mask, bias[-1, tokens - width :])
    distance = torch.arange(tokens, dtype=torch.float32) - torch.arange(tokens, dtype=torch.float32).unsqueeze(1)
    error = torch.where(visible, bias - bias.diagonal().unsqueeze(1) - slope * distance, 0.0)
    _check_error(mask, error, bias)
    return width, slope


def _slope(mask: Node, scores: Tensor) -> float:
    """Return how much `scores` [n] rise from each to the next."""
    scores = scores.double()
    slope = float(scores[-1] - scores[0]) / max(1, len(scores) - 1)
    _check_error(mask, scores - scores[0] - slope * torch.arange(len(scores)), scores)
    return slope


def _check_error(mask: Node, error: Tensor, bias: Tensor) -> None:
    rounding = _ROUNDINGS * torch.finfo(torch.float32).eps * float(bias.abs().max())
    # Not a number is no error that is small enough.
    if not float(error.abs().max()) <= min(rounding, _MOST_ERROR):
        raise _other(mask)


def _other(mask: Node) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{mask.name} ({mask.target}): a mask other than causal, with or without a window and slopes for the heads"
    )
