"""Attention blocks and causal masks as captured graphs have them.

Masks are made of positions and sizes, or cut out of a buffer.
"""

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from picompile.testing.captured.ffn import write_linear, write_norm, write_parts, write_unbound
from picompile.testing.captured.positions import RotaryWriter
from picompile.testing.captured.style import TABLE_ROWS, CapturedStyle, MaskStyle
from picompile.testing.captured.writer import CaptureWriter
from picompile_passes.graph.operands import ATTENTION

_aten = torch.ops.aten

# The factor of scores in every style but `default`, whose factor is 1 / √d.
_GIVEN_SCALE = 0.3


@dataclass(frozen=True)
class AttentionWriter:
    """Writes the attention of all layers."""

    w: CaptureWriter
    style: CapturedStyle
    rotary: RotaryWriter

    def write(self, x: Node, name: str, layer: int) -> Node:
        """Write the attention of layer `layer` on `x` [1, T, n] or [T, n], and return its result in the same shape."""
        q, k, v = self._heads(x, name)
        if self.style.attention.head_norm == "before":
            q, k = (self._normed(side, f"{name}.{letter}_norm") for side, letter in ((q, "q"), (k, "k")))
        rotary_first = self.style.positions.before_transpose
        if rotary_first:
            q, k = self.rotary.turn(q), k if self._shared else self.rotary.turn(k)
        q, k, v = (self.w.swapped(side, self.style.attention.permute) for side in (q, k, v))
        if self._repeats and self.style.attention.repeat_early and not rotary_first:
            # Falcon's, which repeats heads before it turns them.
            k, v = self._repeated(k), self._repeated(v)
        if not rotary_first:
            q, k = self.rotary.turn(q), k if self._shared else self.rotary.turn(k)
        if self.style.attention.head_norm == "after":
            q, k = (self._normed(side, f"{name}.{letter}_norm") for side, letter in ((q, "q"), (k, "k")))
        if self._shared:
            k = self._with_shared(k, x, name)
        q, k = self._scaled_late(q, k)
        merged = self._attended(q, k, v, name, layer)
        bias = self.style.attention.output_bias
        return write_linear(
            self.w, style=self.style.attention.linear, x=merged, name=f"{name}.o_proj", outputs=self._hidden, bias=bias
        )

    @property
    def _hidden(self) -> int:
        return self.style.sizes.hidden

    @property
    def _repeats(self) -> bool:
        sizes, attention = self.style.sizes, self.style.attention
        written = attention.repeat not in ("enable_gqa", "broadcast")
        return sizes.heads > sizes.kv_heads and written and attention.operator != "picompile"

    def _normed(self, heads: Node, name: str) -> Node:
        return write_norm(self.w, self.style.norm, heads, name)

    def _heads(self, x: Node, name: str) -> tuple[Node, Node, Node]:
        """q, k, v as […, T, heads, d]; of k what each head has of its own."""
        attention, sizes = self.style.attention, self.style.sizes
        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        widths = (sizes.head_dim, sizes.head_dim - self._shared, sizes.value_dim)
        columns = [count * width for count, width in zip(counts, widths, strict=True)]
        if attention.fused == "no":
            sides = [self._linear(x, f"{name}.{side}_proj", size) for side, size in zip("qkv", columns, strict=True)]
        else:
            fused = self._linear(x, f"{name}.qkv_proj", sum(columns))
            if attention.fused.startswith("interleaved"):
                return self._interleaved(fused)
            if attention.fused == "unbind":
                q, k, v = write_unbound(self.w, self.w.split_last(fused, 3, sizes.heads, sizes.head_dim), -3)
                return self._scaled_early(q), k, v
            sides = write_parts(self.w, attention.fused, fused, columns)
        sides[0] = self._scaled_early(sides[0])
        q, k, v = (self.w.split_last(*side) for side in zip(sides, counts, widths, strict=True))
        return q, k, v

    @property
    def _shared(self) -> int:
        """The number of elements of a key that all heads share: DeepSeek-V2's are those that rotary turns."""
        turning = self.rotary.turning
        return turning if self.style.attention.shared_keys != "no" and turning < self.style.sizes.head_dim else 0

    def _with_shared(self, own: Node, x: Node, name: str) -> Node:
        """Return the keys of which `own` […, heads, T, n] is the rest."""
        w, permute = self.w, self.style.attention.permute
        shared = w.split_last(self._linear(x, f"{name}.k_shared_proj", self._shared), 1, self._shared)
        if self.style.positions.before_transpose:
            shared = w.swapped(self.rotary.turn_all(shared), permute)
        else:
            shared = self.rotary.turn_all(w.swapped(shared, permute))
        lead = own.meta["val"].dim() - 3
        shared = w.call(_aten.expand.default, shared, [*[-1] * lead, self.style.sizes.kv_heads, -1, -1])
        parts = [shared, own] if self.style.positions.turning == "first" else [own, shared]
        if self.style.attention.shared_keys == "cat":
            return w.call(_aten.cat.default, parts, -1)
        # Memory of the right size, all of which is filled.
        column = w.call(_aten.slice.Tensor, own, -1, 0, 1)
        filled = w.call(_aten.repeat.default, column, [*[1] * lead, 1, 1, self.style.sizes.head_dim])
        first = int(parts[0].meta["val"].shape[-1])
        filled = w.call(_aten.slice_scatter.default, filled, parts[0], -1, 0, first)
        return w.call(_aten.slice_scatter.default, filled, parts[1], -1, first, 2**63 - 1)

    def _linear(self, x: Node, name: str, size: int) -> Node:
        attention = self.style.attention
        return write_linear(self.w, style=attention.linear, x=x, name=name, outputs=size, bias=attention.qkv_bias)

    def _interleaved(self, fused: Node) -> tuple[Node, Node, Node]:
        """Falcon's: for each key head its queries, the key and the value side by side."""
        sizes = self.style.sizes
        group = sizes.heads // sizes.kv_heads
        grouped = self.w.split_last(fused, sizes.kv_heads, group + 2, sizes.head_dim)
        q = self.w.call(_aten.slice.Tensor, grouped, -2, 0, -2)
        # [kv_heads, group, d] → [heads, d], by way of [heads · d].
        q = self.w.split_last(self.w.merge_last(q, 3), sizes.heads, sizes.head_dim)
        k, v = (self._member(grouped, number) for number in (-2, -1))
        return self._scaled_early(q), k, v

    def _member(self, grouped: Node, number: int) -> Node:
        """[…, kv_heads, group + 2, d] → […, kv_heads, d]."""
        if self.style.attention.fused == "interleaved":
            return self.w.call(_aten.select.int, grouped, -2, number)
        constant = self.w.shared(("member", number), lambda: self._index(number))
        skipped = [None] * (grouped.meta["val"].dim() - 2)
        found = self.w.call(_aten.index.Tensor, grouped, [*skipped, constant])
        return self.w.call(_aten.squeeze.dim, found, -2)

    def _index(self, number: int) -> Node:
        return self.w.constant(f"model.lifted_tensor_{-number}", torch.tensor([number]))

    @property
    def _scale(self) -> float:
        default = self.style.attention.scale == "default"
        return self.style.sizes.head_dim**-0.5 if default else _GIVEN_SCALE

    def _scaled_early(self, q: Node) -> Node:
        """OPT's: the query is scaled as it comes out of its projection."""
        if self.style.attention.scale == "query times":
            return self.w.call(_aten.mul.Tensor, q, self._scale)
        if self.style.attention.scale == "query divided":
            return self.w.call(_aten.div.Tensor, q, 1 / self._scale)
        return q

    def _scaled_late(self, q: Node, k: Node) -> tuple[Node, Node]:
        if self.style.attention.scale == "late query times":
            return self.w.call(_aten.mul.Tensor, q, self._scale), k
        if self.style.attention.scale == "both":
            root = math.sqrt(self._scale)
            return self.w.call(_aten.mul.Tensor, q, root), self.w.call(_aten.mul.Tensor, k, root)
        return q, k

    def _window(self, layer: int) -> int:
        mask = self.style.attention.mask
        return 0 if mask.alternate and layer % 2 else mask.window

    def _attended(self, q: Node, k: Node, v: Node, name: str, layer: int) -> Node:
        """Attention of heads […, heads, T, d] → […, T, heads · e]."""
        if self.style.attention.operator == "picompile":
            return self._by_our_operator(q, k, v, name, layer)
        if self._repeats and (self.style.positions.before_transpose or not self.style.attention.repeat_early):
            k, v = self._repeated(k), self._repeated(v)
        style = self.style.attention
        mask = write_mask(self.w, style.mask, self.style.sizes.heads, self._window(layer))
        if style.operator == "products":
            return self.w.merge_last(self.w.swapped(self._by_products(q, k, v, mask), style.permute))
        options: dict[str, object] = {} if style.scale == "default" else {"scale": self._remaining_scale}
        if style.repeat == "enable_gqa":
            options["enable_gqa"] = True
        operator = _aten.scaled_dot_product_attention.default
        attended = self.w.call(operator, q, k, v, mask, 0.0, mask is None, **options)
        return self.w.merge_last(self.w.swapped(attended, style.permute))

    def _by_products(self, q: Node, k: Node, v: Node, mask: Node | None) -> Node:
        """Write attention as two products and a softmax, as eager implementations have it."""
        scores = self.w.call(_aten.matmul.default, q, self.w.call(_aten.transpose.int, k, -1, -2))
        scores = self.w.call(_aten.mul.Tensor, scores, self._remaining_scale)
        if mask is not None and mask.meta["val"].dtype == torch.bool:
            unseen = self.w.call(_aten.logical_not.default, mask)
            scores = self.w.call(_aten.masked_fill.Scalar, scores, unseen, self.style.attention.mask.hidden)
        elif mask is not None:
            scores = self.w.call(_aten.add.Tensor, scores, mask)
        return self.w.call(_aten.matmul.default, self.w.call(_aten.softmax.int, scores, -1), v)

    @property
    def _remaining_scale(self) -> float:
        return self._scale if self.style.attention.scale in ("default", "given") else 1.0

    def _by_our_operator(self, q: Node, k: Node, v: Node, name: str, layer: int) -> Node:
        """Call the dialect's operator, which capture registers with transformers as an attention function."""
        sizes, style = self.style.sizes, self.style.attention
        sides = [self.w.merge_last(self.w.swapped(side)) for side in (q, k, v)]
        numbers = (sizes.heads, sizes.kv_heads, self._remaining_scale, layer, self._window(layer))
        options: dict[str, object] = {"softcap": style.softcap} if style.softcap else {}
        if style.mask.slopes != "no":
            options["slopes"] = self.w.shared("slopes", lambda: self.w.constant("model.slopes", _slopes(sizes.heads)))
        if style.sinks:
            options["sinks"] = self.w.parameter(f"{name}.sinks", sizes.heads)
        attended = self.w.call(ATTENTION, *sides, *numbers, **options)
        return self.w.merge_last(self.w.split_last(attended, sizes.heads, sizes.value_dim))

    def _repeated(self, x: Node) -> Node:
        """Key heads […, kv_heads, T, d], each as often as there are queries for it → […, heads, T, d]."""
        sizes, way = self.style.sizes, self.style.attention.repeat
        group = sizes.heads // sizes.kv_heads
        if way == "repeat_interleave":
            return self.w.call(_aten.repeat_interleave.self_int, x, group, -3)
        if way == "index_select":
            table = self.w.shared("repeat", lambda: self._repeat_table(group))
            return self.w.call(_aten.index_select.default, x, -3, table)
        batch = [1] if self.w.batched else []
        shape = [*batch, sizes.heads, self.w.size(), int(x.meta["val"].shape[-1])]
        return self.w.reshape(self._repeated_in_groups(x, way, group), shape)

    def _repeated_in_groups(self, x: Node, way: str, group: int) -> Node:
        """[…, kv_heads, T, d] → […, kv_heads, group, T, d]."""
        if way == "stack":
            return self.w.call(_aten.stack.default, [x] * group, -3)
        widened = self.w.call(_aten.unsqueeze.default, x, -3)
        before = widened.meta["val"].dim() - 3
        if way == "repeat":
            return self.w.call(_aten.repeat.default, widened, [*[1] * before, group, 1, 1])
        return self.w.call(_aten.expand.default, widened, [*[-1] * before, group, -1, -1])

    def _repeat_table(self, group: int) -> Node:
        table = torch.arange(self.style.sizes.kv_heads).repeat_interleave(group)
        return self.w.constant("model.repeated_heads", table)


def write_mask(w: CaptureWriter, style: MaskStyle, heads: int, window: int) -> Node | None:
    """Return the mask for `window`, boolean or of 0 and `style.hidden`; None for `is_causal`. All layers share it."""
    if style.visible == "is_causal":
        return None
    return w.shared(("mask", window), lambda: _mask(w, style, heads, window))  # type: ignore[no-any-return]


def _mask(w: CaptureWriter, style: MaskStyle, heads: int, window: int) -> Node:
    if style.visible == "triu":
        mask = _added_triangles(w, style.hidden, window)
    else:
        mask = _in_form(w, style, _visible(w, style.visible, window))
    mask = _with_heads(w, style.dimensions, mask, heads)
    return mask if style.slopes == "no" else _with_slopes(w, style, mask, heads)


def _slopes(heads: int) -> torch.Tensor:
    """Return a slope for each head, as ALiBi has them for powers of two (arXiv 2108.12409): float32 [heads]."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)


def _with_slopes(w: CaptureWriter, style: MaskStyle, mask: Node, heads: int) -> Node:
    """A mask, boolean or not, with slopes times positions where it shows a key."""
    slopes = w.shared("alibi", lambda: w.constant("model.alibi", _slopes(heads).reshape(-1, 1, 1)))
    places = w.call(_aten.unsqueeze.default, w.positions, 0)
    if style.slopes == "distances":
        places = w.call(_aten.sub.Tensor, places, w.call(_aten.unsqueeze.default, w.positions, 1))
    bias = w.call(_aten.mul.Tensor, slopes, w.call(_aten._to_copy.default, places, dtype=torch.float32))
    if mask.meta["val"].dtype == torch.bool:
        return w.call(_aten.where.ScalarOther, mask, bias, style.hidden)
    return w.call(_aten.add.Tensor, bias, mask)


def _visible(w: CaptureWriter, kind: str, window: int) -> Node:
    """A boolean mask, true where a token is seen."""
    if kind == "transformers":
        return _transformers_mask(w, window)
    if kind == "tril":
        return _triangle(w, window)
    if kind == "buffer":
        return _cut_out(w, window)
    places = w.positions if kind == "positions" else _arange(w)
    return _compared(
        w,
        w.call(_aten.unsqueeze.default, places, 1),
        w.call(_aten.unsqueeze.default, places, 0),
        window,
    )


def _compared(w: CaptureWriter, query: Node, key: Node, window: int) -> Node:
    seen = w.call(_aten.le.Tensor, key, query)
    if window == 0:
        return seen
    near = w.call(_aten.gt.Tensor, key, w.call(_aten.sub.Tensor, query, window))
    return w.call(_aten.logical_and.default, seen, near)


def _triangle(w: CaptureWriter, window: int) -> Node:
    ones = w.call(_aten.ones.default, [w.size(), w.size()], dtype=torch.bool)
    seen = w.call(_aten.tril.default, ones)
    return seen if window == 0 else w.call(_aten.triu.default, seen, 1 - window)


def _cut_out(w: CaptureWriter, window: int) -> Node:
    """nanoGPT's: a square of a larger buffer."""
    ones = torch.ones(TABLE_ROWS, TABLE_ROWS, dtype=torch.bool).tril()
    table = w.constant(f"model.causal_mask_{window}", ones.triu(1 - window) if window else ones)
    return w.call(
        _aten.slice.Tensor,
        w.call(_aten.slice.Tensor, table, 0, 0, w.size()),
        1,
        0,
        w.size(),
    )


def _transformers_mask(w: CaptureWriter, window: int) -> Node:
    """Write the mask of transformers 5: positions looked up for every pair, and packed texts told apart."""
    positions = w.call(_aten.unsqueeze.default, w.positions, 0)
    before = w.call(_aten.sub.Tensor, w.call(_aten.slice.Tensor, positions, 1, 0, 1), 1)
    jumps = w.call(_aten.ne.Scalar, w.call(_aten.diff.default, positions, 1, -1, before), 1)
    text = w.call(_aten.cumsum.default, jumps, -1)
    batch = w.call(_aten.arange.default, 1)
    for dim in (1, 2, 3):
        batch = w.call(_aten.unsqueeze.default, batch, dim)
    query, key = (_with_dimensions(w, w.call(_aten.add.Tensor, _arange(w), 0), last) for last in (3, 2))
    same_text = w.call(
        _aten.eq.Tensor,
        *(w.call(_aten.index.Tensor, text, [batch, side]) for side in (query, key)),
    )
    always = w.call(_aten.new_ones.default, query, [], dtype=torch.bool)
    query, key = (w.call(_aten.index.Tensor, positions, [batch, side]) for side in (query, key))
    seen = _compared(w, query, key, window)
    both = w.call(_aten.__and__.Tensor, w.call(_aten.__and__.Tensor, always, same_text), seen)
    return w.call(_aten.expand.default, both, [1, -1, w.size(), w.size()])


def _with_dimensions(w: CaptureWriter, places: Node, last: int) -> Node:
    """[T] → [1, 1, T, 1] or [1, 1, 1, T]."""
    for dim in (0, 1, last):
        places = w.call(_aten.unsqueeze.default, places, dim)
    return places


def _added_triangles(w: CaptureWriter, hidden: float, window: int) -> Node:
    """Return the mask of transformers 4: a full matrix, cut to the upper triangle and the lower outside the window."""
    full = w.call(_aten.full.default, [w.size(), w.size()], hidden)
    later = w.call(_aten.triu.default, full, 1)
    return later if window == 0 else w.call(_aten.add.Tensor, later, w.call(_aten.tril.default, full, -window))


def _in_form(w: CaptureWriter, style: MaskStyle, seen: Node) -> Node:
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


def _with_heads(w: CaptureWriter, dimensions: str, mask: Node, heads: int) -> Node:
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


def _arange(w: CaptureWriter) -> Node:
    return w.call(_aten.arange.default, w.size())
