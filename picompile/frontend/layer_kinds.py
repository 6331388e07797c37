"""The kinds of a model's layers: layers of one kind compute the same, so that one of them stands for all.

Layers are of one kind if their modules are: classes, attributes, the shapes of parameters and the values of buffers,
and what the config says of each layer. Nothing is taken from names of fields. `PassedLayers` shows that the model
treats all layers of a kind alike. An attribute that holds the layer's number may be passed on, but not computed with.
If this cannot be shown, that is no error: such a model is captured layer by layer.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from picompile_passes.graph.stamps import Stamps

# What `nn.Module` has for each module, besides what a class adds.
_OWN = frozenset(vars(nn.Module()))
_PLAIN = (int, float, str, bytes, tuple, list, dict, set, frozenset, torch.dtype, torch.device, type(None))


class UnequalLayersError(Exception):
    """A model treats layers that look alike differently."""


@dataclass(frozen=True)
class LayerList:
    """The layers of a model that are captured, and the others.

    Attributes:
        name: the dotted name of the `nn.ModuleList`.
        sources: for each layer, the captured one that it equals.
        captured: how many layers are captured, the first ones.
        numbers: for each layer, the attributes that hold its number, as paths of a module and a name.
    """

    name: str
    sources: tuple[int, ...]
    captured: int
    numbers: tuple[tuple[str, str], ...]

    @property
    def stamps(self) -> Stamps:
        """The record for the pass `stamp-layers`."""
        return Stamps(f"{self.name}.", self.sources, self.captured)


def find_layers(module: nn.Module) -> LayerList | None:
    """Return the layers of `module`; None where there are too few, or too many kinds, to gain from it."""
    named = ((name, found) for name, found in module.named_modules() if isinstance(found, nn.ModuleList))
    name, layers = next(((name, list(found)) for name, found in named if len(found) > 2), ("", []))
    if not layers or _shares(module, name):
        return None
    lists = _lists_of_configs(module, len(layers))
    facts = [
        _facts(layer) | {key: values[number] for key, values in lists.items()} for number, layer in enumerate(layers)
    ]
    numbers = tuple(
        key
        for key, value in facts[1].items()
        if type(value) is int and all(type(own.get(key)) is int and own[key] == at for at, own in enumerate(facts))
    )
    kinds: list[list[int]] = []
    for number, own in enumerate(facts):
        kind = next((kind for kind in kinds if _same_facts(facts[kind[0]], own, numbers)), None)
        if kind is None:
            kinds.append(kind := [])
        kind.append(number)
    captured = max(kind[min(1, len(kind) - 1)] for kind in kinds) + 1
    # The second of a kind is stamped, since the first may be the model's first layer, which reads the embeddings.
    sources = {number: number if number < captured else kind[1] for kind in kinds for number in kind}
    if len(layers) <= 2 * captured:
        return None
    return LayerList(name, tuple(sources[number] for number in range(len(layers))), captured, numbers)


def _shares(module: nn.Module, name: str) -> bool:
    """Return whether a parameter of a layer stands in another place of the model too."""
    owners: dict[int, str] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        inside = path.removeprefix(f"{name}.") if path.startswith(f"{name}.") else ""
        owner = inside.partition(".")[0]
        if owners.setdefault(id(parameter), owner) != owner:
            return True
    return False


def _facts(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what a layer consists of, by the path of a module in it and the name of an attribute."""
    facts: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        facts[path, "class"] = type(module)
        for name, value in vars(module).items():
            if name not in _OWN:
                facts[path, name] = value
            elif name.endswith("hooks") and value:
                # A hook may do anything: no layer equals this one.
                facts[path, name] = object()
        parameters = ((name, tensor) for name, tensor in module._parameters.items() if tensor is not None)
        facts |= {(path, name): (tensor.shape, tensor.dtype) for name, tensor in parameters}
        facts |= {(path, name): tensor for name, tensor in module._buffers.items() if tensor is not None}
    return facts


def _lists_of_configs(module: nn.Module, layers: int) -> dict[tuple[str, str], Sequence[Any]]:
    """Return the lists with one entry for each of `layers` in configs, by the place of the config and the field."""
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    return {
        (str(place), name): value
        for place, config in enumerate(configs.values())
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == layers
    }


def _same_facts(
    one: Mapping[tuple[str, str], Any], other: Mapping[tuple[str, str], Any], numbers: Sequence[tuple[str, str]]
) -> bool:
    return one.keys() == other.keys() and all(key in numbers or _same(value, other[key]) for key, value in one.items())


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal for certain."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        real = not one.is_meta and not other.is_meta
        return real and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return _same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    try:
        return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)
    except Exception:
        # Tensors in a list, say.
        return False


class LayerNumber(int):
    """The number of a layer, which a module may hand on; to compute or compare with it is an error."""

    def _refuse(self, *others: object) -> Any:
        raise UnequalLayersError(f"a module computes with the number of its layer, {int.__repr__(self)}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __lshift__ = __rshift__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __float__ = __hash__ = __index__ = _refuse


@dataclass
class _LayerCall:
    """A call of a layer: its arguments and results, as leaves and what they are arranged in."""

    given: list[Any]
    arranged: Any
    results: list[Any]
    result_arranged: Any


@dataclass
class PassedLayers(torch.overrides.TorchFunctionMode):
    """The layers of a copy of a model, of which those that equal another are passed by.

    `check` runs the model once with all layers: the first ones compute, the others give new values. It raises
    `UnequalLayersError` unless each is called once, in order, with what the layer that it equals was called with, and
    unless nothing but the next layer reads what it gives. Afterwards the others give what they are given, so that an
    export of the model has the first layers only.
    """

    layers: Sequence[nn.Module]
    found: LayerList
    calls: list[_LayerCall] = field(default_factory=list)
    _between: set[int] = field(default_factory=set)  # what only the next layer may read

    def __post_init__(self) -> None:
        """Take the place of all layers."""
        super().__init__()
        for number, layer in enumerate(self.layers):
            if number < self.found.captured:
                for path, name in self.found.numbers:
                    setattr(layer.get_submodule(path), name, LayerNumber(number))
                _set_forward(layer, self._computed(layer.forward))
            else:
                _set_forward(layer, self._passed)

    def check(self, run: Callable[[], object]) -> None:
        """Call `run`, which runs the model, and then let the layers pass by."""
        with self:
            run()
        if len(self.calls) != len(self.found.sources):
            raise UnequalLayersError(f"{len(self.calls)} of {len(self.found.sources)} layers are called")
        for number, layer in enumerate(self.layers):
            if number < self.found.captured:
                del layer.forward
            else:
                _set_forward(layer, self._giving_back(self.found.sources[number]))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`; refuse one that reads what a layer gives which is passed to the next."""
        kwargs = kwargs or {}
        reads = self._between and getattr(func, "__name__", "") != "__get__"
        if reads and any(id(value) in self._between for value in tree_flatten((args, kwargs))[0]):
            raise UnequalLayersError("the model computes with what is in between two layers")
        return func(*args, **kwargs)

    def _computed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self._note(args, kwargs, result)
            return result

        return call

    def _passed(self, *args: Any, **kwargs: Any) -> Any:
        number = len(self.calls)
        source = self.found.sources[number]
        like, before, own = self.calls[source], self.calls[source - 1], self.calls[number - 1]
        given, arranged = tree_flatten((args, kwargs))
        if arranged != like.arranged:
            raise UnequalLayersError(f"layer {number} has other arguments than layer {source}")
        for mine, its in zip(given, like.given, strict=True):
            place = _place(its, before.results)
            if mine is not own.results[place] if place is not None else not _same(mine, its):
                raise UnequalLayersError(f"layer {number} is called with other values than layer {source}")
        with torch._C.DisableTorchFunction():
            results = [torch.empty_like(value) if isinstance(value, Tensor) else value for value in like.results]
        result = tree_unflatten(results, like.result_arranged)
        self._note(args, kwargs, result)
        return result

    def _note(self, args: Any, kwargs: Any, result: Any) -> None:
        if self.found.captured <= len(self.calls) < len(self.found.sources):
            self._between.update(id(value) for value in self.calls[-1].results if isinstance(value, Tensor))
        self.calls.append(_LayerCall(*tree_flatten((args, kwargs)), *tree_flatten(result)))

    def _carried(self, source: int) -> dict[int, int]:
        """Return the places among a layer's arguments of what the layer before gives, by the places of its results."""
        before = self.calls[source - 1].results
        return {
            place: number
            for number, value in enumerate(self.calls[source].given)
            if (place := _place(value, before)) is not None
        }

    def _giving_back(self, source: int) -> Callable[..., Any]:
        carried, like = self._carried(source), self.calls[source]

        def call(*args: Any, **kwargs: Any) -> Any:
            given, _ = tree_flatten((args, kwargs))
            results = [given[carried[place]] if place in carried else value for place, value in enumerate(like.results)]
            return tree_unflatten(results, like.result_arranged)

        return call


def hollow(layer: nn.Module) -> nn.Module:
    """Return a layer to pass by: of the same class and with the same attributes, but without modules and tensors."""
    result: nn.Module = object.__new__(type(layer))
    vars(result).update(vars(layer) | {"_modules": {}, "_parameters": {}, "_buffers": {}})
    return result


def _set_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    # An attribute of the module itself, which is found before the method of its class.
    object.__setattr__(layer, "forward", forward)


def _place(value: object, results: Sequence[object]) -> int | None:
    if not isinstance(value, Tensor):
        return None
    return next((place for place, result in enumerate(results) if result is value), None)
