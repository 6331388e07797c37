"""Causal masks as captured graphs have them, made of positions and sizes or cut out of a buffer."""

import torch
from torch.fx import Node

from picompile.testing.captured_style import TABLE_ROWS, MaskStyle
from picompile.testing.captured_writer import Writer

_aten = torch.ops.aten


def write_mask(w: Writer, style: MaskStyle, heads: int, window: int) -> Node | None:
    """The mask for `window`, None for `is_causal`: boolean, or 0 and `style.hidden`; all layers share it."""
    if style.visible == "is_causal":
        return None
    return w.shared(("mask", window), lambda: _mask(w, style, heads, window))  # type: ignore[no-any-return]


def _mask(w: Writer, style: MaskStyle, heads: int, window: int) -> Node:
    if style.visible == "triu":
        mask = _added_triangles(w, style.hidden, window)
    else:
        mask = _in_form(w, style, _visible(w, style.visible, window))
    return _with_heads(w, style.dimensions, mask, heads)


def _visible(w: Writer, kind: str, window: int) -> Node:
    """A boolean mask, true where a token is seen."""
    if kind == "transformers":
        return _transformers_mask(w, window)
    if kind == "tril":
        return _triangle(w, window)
    if kind == "buffer":
        return _cut_out(w, window)
    places = w.positions if kind == "positions" else _arange(w)
    return _compared(w, w.call(_aten.unsqueeze.default, places, 1), w.call(_aten.unsqueeze.default, places, 0), window)


def _compared(w: Writer, query: Node, key: Node, window: int) -> Node:
    seen = w.call(_aten.le.Tensor, key, query)
    if window == 0:
        return seen
    near = w.call(_aten.gt.Tensor, key, w.call(_aten.sub.Tensor, query, window))
    return w.call(_aten.logical_and.default, seen, near)


def _triangle(w: Writer, window: int) -> Node:
    ones = w.call(_aten.ones.default, [w.size(), w.size()], dtype=torch.bool)
    seen = w.call(_aten.tril.default, ones)
    return seen if window == 0 else w.call(_aten.triu.default, seen, 1 - window)


def _cut_out(w: Writer, window: int) -> Node:
    """nanoGPT's: a square of a larger buffer."""
    ones = torch.ones(TABLE_ROWS, TABLE_ROWS, dtype=torch.bool).tril()
    table = w.constant(f"model.causal_mask_{window}", ones.triu(1 - window) if window else ones)
    return w.call(_aten.slice.Tensor, w.call(_aten.slice.Tensor, table, 0, 0, w.size()), 1, 0, w.size())


def _transformers_mask(w: Writer, window: int) -> Node:
    """What transformers 5 leaves in a graph: positions looked up for every pair, and packed texts told apart."""
    positions = w.call(_aten.unsqueeze.default, w.positions, 0)
    before = w.call(_aten.sub.Tensor, w.call(_aten.slice.Tensor, positions, 1, 0, 1), 1)
    jumps = w.call(_aten.ne.Scalar, w.call(_aten.diff.default, positions, 1, -1, before), 1)
    text = w.call(_aten.cumsum.default, jumps, -1)
    batch = w.call(_aten.arange.default, 1)
    for dim in (1, 2, 3):
        batch = w.call(_aten.unsqueeze.default, batch, dim)
    query, key = (_with_dimensions(w, w.call(_aten.add.Tensor, _arange(w), 0), last) for last in (3, 2))
    same_text = w.call(_aten.eq.Tensor, *(w.call(_aten.index.Tensor, text, [batch, side]) for side in (query, key)))
    always = w.call(_aten.new_ones.default, query, [], dtype=torch.bool)
    query, key = (w.call(_aten.index.Tensor, positions, [batch, side]) for side in (query, key))
    seen = _compared(w, query, key, window)
    both = w.call(_aten.__and__.Tensor, w.call(_aten.__and__.Tensor, always, same_text), seen)
    return w.call(_aten.expand.default, both, [1, -1, w.size(), w.size()])


def _with_dimensions(w: Writer, places: Node, last: int) -> Node:
    """[T] → [1, 1, T, 1] or [1, 1, 1, T]."""
    for dim in (0, 1, last):
        places = w.call(_aten.unsqueeze.default, places, dim)
    return places


def _added_triangles(w: Writer, hidden: float, window: int) -> Node:
    """transformers 4's: a full matrix of which the upper triangle stays, and the lower one outside the window."""
    full = w.call(_aten.full.default, [w.size(), w.size()], hidden)
    later = w.call(_aten.triu.default, full, 1)
    return later if window == 0 else w.call(_aten.add.Tensor, later, w.call(_aten.tril.default, full, -window))


def _in_form(w: Writer, style: MaskStyle, seen: Node) -> Node:
    """A boolean mask as `style.form` has it."""
    if style.form == "boolean":
        return seen
    if style.form == "where":
        return w.call(_aten.where.Scalar, seen, 0.0, style.hidden)
    if style.form == "log":
        return w.call(_aten.log.default, w.call(_aten._to_copy.default, seen, dtype=torch.float32))
    unseen = w.call(_aten.logical_not.default, seen)
    if style.form == "product":
        return w.call(_aten.mul.Tensor, unseen, style.hidden)
    zeros = w.call(_aten.zeros.default, [w.size(), w.size()])
    return w.call(_aten.masked_fill.Scalar, zeros, unseen, style.hidden)


def _with_heads(w: Writer, dimensions: str, mask: Node, heads: int) -> Node:
    """A mask for all heads alike, written out for each where `dimensions` is `expanded`."""
    wanted = 4 if w.batched else 3
    # A mask of more dimensions than the queries would give its own to the result.
    while mask.meta["val"].dim() > wanted:
        mask = w.call(_aten.squeeze.dim, mask, 0)
    if dimensions == "plain":
        return mask
    while mask.meta["val"].dim() < wanted:
        mask = w.call(_aten.unsqueeze.default, mask, 0)
    if dimensions == "heads":
        return mask
    return w.call(_aten.expand.default, mask, [*([1] if w.batched else []), heads, -1, -1])


def _arange(w: Writer) -> Node:
    return w.call(_aten.arange.default, w.size())
