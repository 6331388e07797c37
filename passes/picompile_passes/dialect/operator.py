"""`Operator`: all that is said of an operator of the dialect, in one record.

An operator is declared once, in a file of its own, on its eager function:

    @operator(part="linear", dimensions={"x": "TK", "weight": "NK", "bias": "N"}, result="TN", packed=("weight",))
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

The schema comes from the function's signature. Verifier, passes, lowering and documents read the record. Leading
dimensions are free: T stands for `[tokens]` and for `[..., tokens]`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from picompile_passes.dialect.state import State
from picompile_passes.graph.values import value_text

Part = Literal["embedding", "linear", "norm", "position", "pointwise", "mixer", "block", "mask", "router", "packing"]
Form = Literal["dense", "sparse", "packing"]


@dataclass(frozen=True)
class Call:
    """A call in a graph, for the checks of its operator.

    Attributes:
        node: the call.
        values: its arguments by name, defaults filled in; nodes stand for tensors.
        constants: the nodes of the graph that depend on no input.
    """

    node: Node
    values: Mapping[str, Any]
    constants: frozenset[Node]

    def columns(self, name: str) -> int:
        """Return the size of the last dimension of an argument."""
        return int(self.values[name].meta["val"].shape[-1])

    def text(self, name: str) -> str:
        """Return the dtype and shape of an argument, for a message."""
        return value_text(self.values[name].meta["val"])


# Yields what is wrong with a call, a sentence about the call each.
Check = Callable[[Call], Iterator[str]]


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator of the dialect. Calling it calls `target`.

    Attributes:
        name: the name of its eager function.
        target: what nodes of a graph call.
        eager: the reference in plain PyTorch, through which gradients flow. `target` has none.
        part: what it is in a layer. A `mixer` mixes tokens, a `block` is a feed-forward block, a `mask` says which
            neurons of one fire, and a `router` which experts of one run; `position` turns what a mixer reads, and
            `packing` works on constants.
        dimensions: for each operand that is a tensor, a letter for each dimension. A letter stands for one size
            throughout a call. T is the number of tokens: what begins with it has a row for each token. F is the number
            of neurons: what begins with it has a row, or a number, for each neuron. Lists of tensors are left out.
        packed: the operands that quantization packs, in the order of the signature. Lists may hold vectors too.
        forms: the graphs that may call it: `dense` ones (canonical), `sparse` ones (predicted and later), or
            `packing`, the constants of quantized ones.
        state: the state that it keeps between tokens, for each sequence.
        checks: what must hold of a call besides its dimensions.
    """

    name: str
    target: OpOverload
    eager: Callable[..., Tensor]
    part: Part
    dimensions: Mapping[str, str]
    packed: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ("dense", "sparse")
    state: State | None = None
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        """Make the operator known to `operator_of`. Raise `ValueError` for a fact about an operand that it has not."""
        has = {argument.name for argument in self.target._schema.arguments}
        for name in (*self.dimensions, *self.packed):
            if name not in has:
                raise ValueError(f"operator {self.name} has no operand {name!r}")
        _BY_TARGET[self.target] = self

    def __call__(self, *operands: Any, **named: Any) -> Any:
        """Return what `target` does."""
        return self.target(*operands, **named)

    @property
    def values(self) -> tuple[str, ...]:
        """The operands that are values [tokens, columns]."""
        return tuple(name for name, letters in self.dimensions.items() if letters[0] == "T" and len(letters) > 1)

    @property
    def neuron_operands(self) -> tuple[str, ...]:
        """The operands with a row, or a number, for each neuron."""
        return tuple(name for name, letters in self.dimensions.items() if letters[0] == "F")


_BY_TARGET: dict[object, Operator] = {}


def operator_of(target: object) -> Operator | None:
    """Return the operator that a call of `target` calls, or None for a function that is no operator of the dialect."""
    return _BY_TARGET.get(target)


def operator_name(target: object) -> str:
    """Return the name of the operator that a call of `target` calls; nothing for a function that is none."""
    return _BY_TARGET[target].name if target in _BY_TARGET else ""


def operator(
    *,
    result: str | Callable[..., Tensor],
    operands: type[tuple[Any, ...]] | None = None,
    namespace: str = "picompile",
    **facts: Any,
) -> Callable[[Callable[..., Tensor]], Operator]:
    """Make an operator of an eager function, as a decorator.

    Args:
        result: the letters of the result's dimensions, or its fake implementation. This is called with all operands by
            name, names those that it needs, and takes the others as `**_`.
        operands: the named tuple of the operands, where the eager function takes these as one.
        namespace: the library of the operator in `torch.ops`. A package has its own.
        facts: other fields of the `Operator`.
    """

    def define(function: Callable[..., Tensor]) -> Operator:
        name, eager = function.__name__, function
        signature = inspect.signature(function)
        if operands is not None:
            signature = inspect.signature(operands).replace(return_annotation=Tensor)

            def eager(*given: Any, **named: Any) -> Tensor:
                return function(operands(*given, **named))

            eager.__signature__ = signature  # type: ignore[attr-defined]

        def fake(*given: Any, **named: Any) -> Tensor:
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            if isinstance(result, str):
                return _empty(bound.arguments, facts["dimensions"], result)
            return result(**bound.arguments)

        torch.library.custom_op(f"{namespace}::{name}", eager, mutates_args=()).register_fake(fake)
        target = getattr(getattr(torch.ops, namespace), name).default
        eager.__doc__ = function.__doc__
        return Operator(name=name, target=target, eager=eager, **facts)

    return define


def _empty(values: Mapping[str, Any], dimensions: Mapping[str, str], letters: str) -> Tensor:
    """Return a tensor of the dimensions `letters` without data, like the first operand that gives it its columns."""
    tensors = {name: values[name] for name in dimensions if isinstance(values[name], Tensor)}
    first = next(name for name in tensors if letters[-1] in dimensions[name])
    if dimensions[first] == letters:
        return torch.empty_like(tensors[first])
    sizes: dict[str, tuple[Any, ...]] = {}
    for name, tensor in tensors.items():
        outer = tensor.dim() - len(dimensions[name]) + 1
        parts = [tuple(tensor.shape[:outer]), *((size,) for size in tensor.shape[outer:])]
        sizes = dict(zip(dimensions[name], parts, strict=False)) | sizes
    empty: Tensor = tensors[first].new_empty([size for letter in letters for size in sizes[letter]])
    return empty
