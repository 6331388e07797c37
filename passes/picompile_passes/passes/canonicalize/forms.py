"""Forms: a value of a captured graph as a linear function of another value, whatever operators it is written with.

Between a projection and an attention lie views, transposes, slices, head repetitions, a fused split, a scale and a
rotation, and every model writes them in its own way. All of them are linear in the projection's result, with factors
that depend on positions alone. So each such value has a *form*: a root value (the result of an operator that is not
linear in this sense), and for every element a few terms, each an element of the root times a number. Passes match forms
instead of ways of writing.

Forms are computed by running the graph's own operators on index tensors, for a sample of seven tokens at positions 0 to
6, so that no code describes a second time what an operator does with elements. Values that depend only on positions,
sizes and constants are *known*: they are evaluated.

The tables below list the operators of torch through which a value stays linear: those that move elements, sums, and
products with known factors.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import attribute, has_real_data
from picompile_passes.graph.operands import EMBEDDING

_aten = torch.ops.aten

# Operators that only rearrange, repeat or select elements of their first argument.
MOVES: frozenset[Any] = frozenset(
    {
        _aten.alias.default,
        _aten.broadcast_to.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.flatten.using_ints,
        _aten.flip.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.mT.default,
        _aten.narrow.default,
        _aten.numpy_T.default,
        _aten.permute.default,
        _aten.repeat.default,
        _aten.repeat_interleave.self_int,
        _aten.reshape.default,
        _aten.roll.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unflatten.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._unsafe_view.default,
    }
)
# Operators that split the elements of their first argument into several results.
SPLITS: frozenset[Any] = frozenset(
    {
        _aten.chunk.default,
        _aten.split.Tensor,
        _aten.split.sizes,
        _aten.split_with_sizes.default,
        _aten.unbind.int,
    }
)
JOINS: frozenset[Any] = frozenset({_aten.cat.default, _aten.stack.default})
# A part of its first argument is replaced by its second: how a value is filled piece by piece.
SCATTERS: frozenset[Any] = frozenset({_aten.slice_scatter.default})
SUMS: dict[Any, float] = {_aten.add.Tensor: 1.0, _aten.sub.Tensor: -1.0}
MULTIPLY: frozenset[Any] = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
DIVIDE: frozenset[Any] = frozenset({_aten.div.Tensor, _aten.div.Scalar})
NEGATE = _aten.neg.default
# A view of a tensor of other strides may be refused; element for element it is a reshape.
AS_RESHAPE: frozenset[Any] = frozenset({_aten.view.default, _aten._unsafe_view.default})

SAMPLE_TOKENS = 7


@dataclass(frozen=True)
class Term:
    """One summand of every element: root.flatten()[index] · factor. Both tensors have the value's sampled shape."""

    index: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Form:
    """A value as a sum of `terms` over the elements of the value of `root`."""

    root: Node
    terms: tuple[Term, ...]

    @property
    def shape(self) -> torch.Size:
        """The value's shape at the sample."""
        return self.terms[0].index.shape


def most_tokens(graph_module: GraphModule) -> int | None:
    """The greatest token count that a graph was captured for; None where it says none."""
    symbol = _token_count(graph_module)
    bound = symbol.node.shape_env.var_to_range[symbol.node.expr].upper
    return int(bound) if bound.is_Integer else None


def _token_count(graph_module: GraphModule) -> Any:
    placeholder = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
    return placeholder.meta["val"].shape[0]


class Forms:
    """The forms of one graph, which must not change while they are in use.

    The sample has `tokens` tokens, or as many as the graph was captured for where those are fewer. An operator that
    fails on the sample raises `UnsupportedGraphError`. With `lookups`, rows of a constant that are looked up by
    position count as known; without it every lookup is a root.
    """

    def __init__(self, graph_module: GraphModule, tokens: int = SAMPLE_TOKENS, *, lookups: bool = False) -> None:
        self._graph_module = graph_module
        self._lookups = lookups
        self._symbol = _token_count(graph_module)
        self.tokens = min(tokens, self.most_tokens or tokens)
        self._known: dict[Node, Any] = {}
        self._roots: dict[Node, Node | None] = {}
        for node in graph_module.graph.nodes:
            self._roots[node] = self._find_root(node)

    @property
    def tokens_shape(self) -> torch.Size:
        """The graph's token count, which is not the sample's, as a shape [T]."""
        return torch.Size([self._symbol])

    @property
    def most_tokens(self) -> int | None:
        """The greatest token count that the graph was captured for; None where it says none."""
        return most_tokens(self._graph_module)

    def is_known(self, node: Node) -> bool:
        """Whether the value of `node` depends on positions, sizes and constants only."""
        return self._roots[node] is None

    def root(self, node: Node) -> Node:
        """The value that `node` is a form of; `node` itself where it is none of another."""
        return self._roots[node] or node

    def known(self, node: Node) -> Any:
        """The value of a known `node` for the sample, whose positions are 0, 1, 2 …"""
        if node not in self._known:
            self._known[node] = self._evaluate(node)
        return self._known[node]

    def form(self, node: Node) -> Form:
        """The form of a `node` that is not known."""
        return Form(self.root(node), self._terms(node))

    def by_root(self, node: Node) -> dict[Node, tuple[Term, ...]]:
        """The terms of a `node` that is not known, by root, where values of several roots are joined in it.

        Elements have factors of 0 where they are made of other roots, or are known.
        """
        root = self.root(node)
        if root.target in JOINS:
            joined = self._by_root_of_parts(root, root.args[0], lambda parts: (parts,))  # type: ignore[arg-type]
        elif root.target in SCATTERS:
            joined = self._by_root_of_parts(root, root.args[:2], tuple)  # type: ignore[arg-type]
        else:
            return {root: self._terms(node)}
        outer = self._terms(node)
        return {
            inner: tuple(
                Term(term.index.flatten()[own.index], term.factor.flatten()[own.index] * own.factor)
                for term in terms
                for own in outer
            )
            for inner, terms in joined.items()
        }

    def _by_root_of_parts(
        self, node: Node, parts: Sequence[Node], arguments: Callable[[list[Tensor]], tuple[Any, ...]]
    ) -> dict[Node, tuple[Term, ...]]:
        """The terms of a call that puts `parts` together; `arguments` are those of the call in place of `parts`."""
        rest = self._sample_arguments(node.args[len(arguments([torch.empty(0)] * len(parts))) :])

        def put(tensors: list[Tensor]) -> Tensor:
            joined: Tensor = self._run(node, node.target, (*arguments(tensors), *rest))
            return joined

        known = {part: {} if self.is_known(part) else self.by_root(part) for part in parts}
        found: dict[Node, tuple[Term, ...]] = {}
        for root in dict.fromkeys(root for terms in known.values() for root in terms):
            count = max(len(terms.get(root, ())) for terms in known.values())
            columns = [self._padded(part, known[part].get(root, ()), count) for part in parts]
            found[root] = tuple(
                Term(put([terms[i].index for terms in columns]), put([terms[i].factor for terms in columns]))
                for i in range(count)
            )
        # Not those that others took the place of, as of memory that is filled.
        return {root: terms for root, terms in found.items() if any(bool(term.factor.any()) for term in terms)}

    def _padded(self, part: Node, terms: tuple[Term, ...], count: int) -> list[Term]:
        shape = self.sample_shape(part)
        nothing = Term(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64))
        return [*terms, *[nothing] * (count - len(terms))]

    def moved(self, node: Node, *, flat: bool = False) -> tuple[Node, Tensor | None] | None:
        """`node` as columns of its root: (root, table), with node[t, c] = root[t, table[c]], or None where it is not.

        The table is None where it names all columns in order. Dimensions before the last stand for the tokens; with
        `flat`, all dimensions behind that of the tokens are columns, as those of experts and their neurons.
        """
        if self.is_known(node):
            return None
        root = self.root(node)
        if root is node:
            return root, None
        terms = self._terms(node)
        if len(terms) != 1 or not bool((terms[0].factor == 1).all()):
            return None
        shape = terms[0].index.shape
        if not shape or (terms[0].index.numel() != self.tokens * shape[-1] and not flat):
            return None
        columns = self.columns(root)
        rows = terms[0].index.reshape(self.tokens, -1)
        table = rows[0]
        if not torch.equal(rows, table + columns * torch.arange(self.tokens).unsqueeze(-1)):
            return None
        return root, None if torch.equal(table, torch.arange(columns)) else table.clone()

    def is_linear(self, node: Node) -> bool:
        """Whether `node` is made of another value, its root, rather than being one itself."""
        return not self.is_known(node) and self.root(node) is not node

    def same(self, node: Node) -> Node:
        """The node that `node` merely reshapes, keeping the last dimension; `node` itself where it does more."""
        moved = None if self.is_known(node) else self.moved(node)
        if moved is not None and moved[1] is None:
            return moved[0]
        # Its root may lie behind a factor, where a move ahead of that does not.
        while not self.is_known(node) and node.target in MOVES and self._is_reshape(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _is_reshape(self, node: Node) -> bool:
        """Whether a move has the elements of its argument in their order, the last dimension as it was."""
        argument: Node = node.args[0]  # type: ignore[assignment]
        if self.root(argument) is not self.root(node):
            return False
        new, old = self._terms(node), self._terms(argument)
        return new[0].index.shape[-1:] == old[0].index.shape[-1:] and all(
            torch.equal(a.index.flatten(), b.index.flatten()) and torch.equal(a.factor.flatten(), b.factor.flatten())
            for a, b in zip(new, old, strict=True)
        )

    def columns(self, node: Node) -> int:
        """Return the number of elements that the value of `node` has for each token."""
        return self.sample_shape(node).numel() // self.tokens

    def sample_shape(self, node: Node) -> torch.Size:
        """The shape that the value of `node` has for the sample."""
        return torch.Size([self._sample_size(size) for size in node.meta["val"].shape])

    def _sample_size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs({self._symbol.node.expr: self.tokens}))

    def _find_root(self, node: Node) -> Node | None:
        """The root of `node`, or None where its value is known. The roots of its arguments are found already."""
        if node.op == "placeholder":
            return None if node.target == "positions" else node
        if node.op == "get_attr":
            return None if has_real_data(attribute(self._graph_module, str(node.target))) else node
        if node.op != "call_function":
            return node
        if isinstance(node.meta.get("val"), (int, torch.SymInt)):
            return None
        roots = [self._roots[argument] for argument in node.all_input_nodes]
        if all(root is None for root in roots):
            return None if _is_plain(node.target) or (self._lookups and node.target is EMBEDDING) else node
        return self._root_of_call(node)

    def _root_of_call(self, node: Node) -> Node | None:
        if node.target in MOVES or node.target in SPLITS or node.target == NEGATE:
            return self._only_root(node, node.all_input_nodes[:1], rest=node.all_input_nodes[1:])
        if node.target == operator.getitem:
            return self._roots[node.all_input_nodes[0]] if node.all_input_nodes[0].target in SPLITS else node
        if node.target in JOINS:
            return self._only_root(node, node.all_input_nodes)
        if node.target in SUMS:
            return self._only_root(node, node.args) if not node.kwargs else node
        if node.target in MULTIPLY:
            unknown = [a for a in node.args if isinstance(a, Node) and not self.is_known(a)]
            return self._roots[unknown[0]] if len(unknown) == 1 else node
        if node.target in DIVIDE and isinstance(node.args[0], Node) and not node.kwargs:
            return self._only_root(node, node.args[:1], rest=[a for a in node.args[1:] if isinstance(a, Node)])
        return node

    def _only_root(self, node: Node, parts: Sequence[Any], rest: Sequence[Node] = ()) -> Node:
        """The one root of all `parts` where the `rest` is known; otherwise `node` is a root itself."""
        roots = {self._roots[part] if isinstance(part, Node) else None for part in parts}
        (root,) = roots if len(roots) == 1 else (None,)
        return root if root is not None and all(self.is_known(other) for other in rest) else node

    def _terms(self, node: Node) -> tuple[Term, ...]:
        if self.root(node) is node:
            shape = self.sample_shape(node)
            return (Term(torch.arange(shape.numel()).reshape(shape), torch.ones(shape, dtype=torch.float64)),)
        if node.target == operator.getitem:
            return self._terms_of_part(node)
        first = node.args[0]
        if node.target in MOVES:
            return _map(self._terms(first), lambda tensor: self._apply(node, tensor))  # type: ignore[arg-type]
        if node.target == NEGATE:
            return _scaled(self._terms(first), -1.0)  # type: ignore[arg-type]
        if node.target in JOINS:
            return self._terms_of_join(node)
        if node.target in SUMS:
            left, right = (self._terms(part) for part in node.args)  # type: ignore[arg-type]
            return _sum(left, _scaled(right, SUMS[node.target]))
        return self._terms_of_product(node)

    def _terms_of_part(self, node: Node) -> tuple[Term, ...]:
        split, number = node.args
        if not isinstance(split, Node) or split.target not in SPLITS:
            raise ValueError(f"{node.name} takes a part of {split}, which is not a split")
        return _map(self._terms(split.args[0]), lambda tensor: self._apply(split, tensor)[number])  # type: ignore[arg-type]

    def _terms_of_join(self, node: Node) -> tuple[Term, ...]:
        parts = [self._terms(part) for part in node.args[0]]  # type: ignore[arg-type, union-attr]
        count = max(len(terms) for terms in parts)
        padded = [(*terms, *[Term(terms[0].index, terms[0].factor * 0)] * (count - len(terms))) for terms in parts]
        return tuple(
            Term(
                self._apply(node, [terms[number].index for terms in padded]),
                self._apply(node, [terms[number].factor for terms in padded]),
            )
            for number in range(count)
        )

    def _terms_of_product(self, node: Node) -> tuple[Term, ...]:
        left, right = node.args
        if not isinstance(left, Node) or self.is_known(left):
            left, right = right, left
        factor: Any = self.known(right) if isinstance(right, Node) else right
        if node.target in DIVIDE:
            factor = 1.0 / factor
        return _scaled(self._terms(left), factor)  # type: ignore[arg-type]

    def _apply(self, node: Node, first: Any) -> Any:
        """Runs the call of `node` with `first` in place of its first argument."""
        target: Any = torch.ops.aten.reshape.default if node.target in AS_RESHAPE else node.target
        return self._run(node, target, (first, *self._sample_arguments(node.args[1:])))

    def run(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """The value of the call `node`, of whose arguments those that are not known have `values`."""

        def value(argument: Node) -> Any:
            return values[argument] if argument in values else self.known(argument)

        return self._run(node, node.target, torch.fx.node.map_arg(node.args, value))

    def _evaluate(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, (int, torch.SymInt)):
            return self._sample_size(value)
        if node.op == "placeholder":
            return torch.arange(self.tokens)
        if node.op == "get_attr":
            return attribute(self._graph_module, str(node.target))
        return self._run(node, node.target, self._sample_arguments(node.args))

    def _run(self, node: Node, target: Any, args: Sequence[Any]) -> Any:
        """Return the result of `target` for `args` and the keyword arguments of `node`."""
        try:
            return target(*args, **self._sample_arguments(on_cpu(node.kwargs)))
        except (IndexError, RuntimeError) as error:
            # A table shorter than the graph says it takes tokens: only calls by position, unlike slices, get so far.
            raise UnsupportedGraphError(
                f"{node.name} ({node.target}): it fails for {self.tokens} tokens, which the graph says that it takes: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _sample_arguments(self, arguments: Any) -> Any:
        return torch.fx.node.map_arg(arguments, self.known)


def _is_plain(target: Any) -> bool:
    """Whether a call of `target` always gives the same value: not ours, which passes look for, and nothing random."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return bool(target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags)


def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A capture on the meta device made its constants there; evaluated, they must have values."""
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs


def _map(terms: tuple[Term, ...], function: Callable[[Tensor], Tensor]) -> tuple[Term, ...]:
    return tuple(Term(function(term.index), function(term.factor)) for term in terms)


def _scaled(terms: tuple[Term, ...], factor: Any) -> tuple[Term, ...]:
    return tuple(
        Term(term.index.expand(scaled.shape), scaled)
        for term, scaled in ((term, term.factor * factor) for term in terms)
    )


def _sum(left: tuple[Term, ...], right: tuple[Term, ...]) -> tuple[Term, ...]:
    shape = (left[0].index + right[0].index).shape
    return _map((*left, *right), lambda tensor: tensor.expand(shape))
