"""A weight source that serves predictors beside a model's own weights."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from picompile_passes.materialize import WeightSource


class OverlayWeights:
    """`base`, and further tensors that are loaded when they are asked for.

    `shapes` are the further tensors by name, `load` reads one of them. They come before tensors of `base` that have the
    same names.
    """

    def __init__(
        self, base: WeightSource, shapes: Mapping[str, tuple[int, ...]], load: Callable[[str], Tensor]
    ) -> None:
        self._base = base
        self._shapes = dict(shapes)
        self._load = load

    def names(self) -> Iterable[str]:
        """The names of all tensors there are."""
        return [*(name for name in self._base.names() if name not in self._shapes), *self._shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, without reading it. Raises `KeyError` for a name that there is not."""
        return self._shapes[name] if name in self._shapes else self._base.shape(name)

    def load(self, name: str) -> Tensor:
        """The tensor `name`; it must not be written to. Raises `KeyError` for a name that there is not."""
        return self._load(name) if name in self._shapes else self._base.load(name)
