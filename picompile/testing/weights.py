"""Random weights for a graph."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule

from picompile.testing.lookups import embedding_names, predictor_names
from picompile_passes.dialect import FORMATS
from picompile_passes.nodes import attribute, has_real_data

# The second makes values so small that the eps of a norm is no longer lost beside their mean square.
_EMBEDDING_SCALES = (1.0, 0.02)
# What else is small then, so that what attention and feed-forward blocks add to such values is small too.
_OTHER_SCALE = 0.25

# One row in so many is so much larger: activations are seen far from 0 too, where relu6 bends a second time.
_LARGE_ROW_SHARE, _LARGE_ROW_FACTOR = 1 / 8, 4.0


@dataclass
class Weights:
    """A weight source in memory, which notes what is loaded. `tensors` are by name."""

    tensors: dict[str, Tensor]
    loaded: list[str] = field(default_factory=list)

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`."""
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        """The tensor `name` itself. Raises `KeyError` where there is none."""
        self.loaded.append(name)
        return self.tensors[name]


def random_weights(
    graph_module: GraphModule, seed: int = 0, dtype: torch.dtype = torch.float32, representable: str | None = None
) -> Weights:
    """Values of `dtype` for every parameter that `graph_module` reads, with which about half of the neurons fire.

    Seed and name say what a parameter is, whatever else is in the graph. Seeds differ in scale too: with even ones
    embeddings are about 1 in size, with odd ones 0.02, and all that follows is smaller, so that the eps of a norm
    matters.

    With `representable`, a weight format, every matrix is one that the format holds exactly: packed by rows or by
    columns, whole or any of them in any order, it comes out as it went in. Vectors are never packed. Raises
    `ValueError` for another format.
    """
    if representable not in _DRAW:
        raise ValueError(f"there is no weight format {representable!r}; there are {', '.join(FORMATS)}")
    embedding_scale = _EMBEDDING_SCALES[seed % 2]
    other_scale = 1.0 if embedding_scale == 1.0 else _OTHER_SCALE
    embeddings = embedding_names(graph_module)
    own = predictor_names(graph_module)
    tensors = {}
    for name, parameter in _parameters(graph_module).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if parameter.dim() == 2:
            scale = embedding_scale if name in embeddings else other_scale * parameter.shape[1] ** -0.5
            # Predictors' own matrices are packed in q8 where others are in q4.
            form = "q8" if representable == "q4" and name in own else representable
            value = _DRAW[form](parameter.shape, scale, generator)
        else:
            value = _vector(name, parameter.shape, other_scale, generator)
        tensors[name] = value.to(dtype)
    return Weights(tensors)


def _parameters(graph_module: GraphModule) -> dict[str, Tensor]:
    """What nodes read and has no data; capture holds these as buffers."""
    names = dict.fromkeys(str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr")
    tensors = {name: attribute(graph_module, name) for name in names}
    return {name: tensor for name, tensor in tensors.items() if not has_real_data(tensor)}


def _vector(name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """Biases spread around 0; all other vectors are gains of norms, which spread around 1."""
    value = torch.randn(shape, generator=generator) * 0.2
    return value * scale if name.rpartition(".")[2].endswith("bias") else value + 1.0


def _normal(shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """Values of standard deviation `scale`; some rows are larger."""
    large = torch.rand(shape[0], 1, generator=generator) < _LARGE_ROW_SHARE
    return torch.randn(shape, generator=generator) * scale * torch.where(large, _LARGE_ROW_FACTOR, 1.0)


def _half(shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    return _normal(shape, scale, generator).to(torch.float16).to(torch.float32)


def _of_q8(shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """0 and ±127 units: whichever of them meet in a group of 32, its scale is one unit."""
    values = torch.randint(-1, 2, shape, generator=generator) * 127.0
    return values * _power_of_two(scale / (127.0 * (2 / 3) ** 0.5))


def _of_q4(shape: torch.Size, scale: float, generator: torch.Generator) -> Tensor:
    """-8, 4, -2, 1 and 0 units: whichever of them is the largest of a group of 32, it is -8 of the group's scale, and
    the others are then integers of -7 to 7. No size has both signs, for q4 has no +8. Their mean is 0.
    """
    units = torch.tensor([-8.0, 4.0, -2.0, 1.0, 0.0])
    shares = torch.tensor([0.1, 0.2, 0.2, 0.4, 0.1])
    count = max(1, shape.numel())
    values = units[torch.multinomial(shares, count, replacement=True, generator=generator)][: shape.numel()]
    deviation = float((shares * units**2).sum()) ** 0.5
    return values.reshape(shape) * _power_of_two(scale / deviation)


def _power_of_two(value: float) -> float:
    """The power of two next to `value`: multiplying by it rounds nothing."""
    return float(2.0 ** round(torch.tensor(value).log2().item()))


_DRAW: dict[str | None, Callable[[torch.Size, float, torch.Generator], Tensor]] = {
    None: _normal,
    "f16": _half,
    "q8": _of_q8,
    "q4": _of_q4,
}
