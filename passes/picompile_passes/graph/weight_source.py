"""Where the values of parameters come from, a whole parameter or some rows of its matrices at a time."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from picompile_passes.errors import PassesError, PassOptionError
from picompile_passes.graph.operands import PREDICTORS, is_limit


class WeightSource(Protocol):
    """A source of the parameters' values: a checkpoint, or a module in memory.

    One that reads files may also have `load_rows(name, rows)`, so that a stack of matrices is never whole in memory
    (see the function of this name), and one that holds the bytes of weight formats `packed` (see `PackedRows`).
    """

    def names(self) -> Iterable[str]:
        """The names of all tensors there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, without reading it."""
        ...

    def load(self, name: str) -> Tensor:
        """The tensor `name`, in the checkpoint's dtype, on the CPU. It must not be written to."""
        ...


def load_rows(weights: WeightSource, name: str, rows: Tensor) -> Tensor:
    """Return some rows of the tensor `name`, in the checkpoint's dtype; they must not be written to.

    Args:
        weights: the source. Without a `load_rows` of its own, the whole tensor is loaded.
        name: a matrix [rows, columns], or a stack of matrices [matrices, rows, columns], whose rows are counted one
            matrix behind the other.
        rows: the numbers of the rows, int64 [n].

    Returns:
        Values [n, columns].

    Raises:
        KeyError: there is no such tensor.
    """
    own: Callable[[str, Tensor], Tensor] | None = getattr(weights, "load_rows", None)
    return take_rows(weights.load(name), rows) if own is None else own(name, rows)


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return `rows` of a matrix or of a stack of matrices: a view where they lie side by side, else a copy."""
    return tensor.flatten(0, -2)[as_run(rows)]


def as_run(rows: Tensor) -> Tensor | slice:
    """Return row numbers as a slice where they lie side by side: it is copied several times as fast."""
    if len(rows) and bool((rows[1:] - rows[:-1] == 1).all()):
        return slice(int(rows[0]), int(rows[0]) + len(rows))
    return rows


def load_parameter(weights: WeightSource, name: str, expected: Tensor) -> Tensor:
    """Return the tensor `name`, which has the shape of `expected`. Raise as `checked_shape` does."""
    try:
        tensor = weights.load(name)
    except KeyError as error:
        raise _missing(name) from error
    _check_shape(name, tuple(tensor.shape), expected)
    return tensor


def checked_shape(weights: WeightSource, name: str, expected: Tensor) -> tuple[int, ...]:
    """Return the shape of the tensor `name`, without reading it.

    Raises:
        PassOptionError: a parameter of a predictor, or a limit, is not there.
        PassesError: the tensor is not there, or of another shape than `expected`.
    """
    try:
        shape = weights.shape(name)
    except KeyError as error:
        raise _missing(name) from error
    _check_shape(name, shape, expected)
    return shape


def _check_shape(name: str, shape: tuple[int, ...], expected: Tensor) -> None:
    if shape != tuple(expected.shape):
        raise PassesError(f"{name} is {list(shape)} in the weights but {list(expected.shape)} in the graph")


def _missing(name: str) -> PassesError:
    if name.startswith(PREDICTORS):
        why = "limits need values of their own" if is_limit(name) else "a learned predictor needs weights of its own"
        return PassOptionError(f"the weights hold no {name}: {why}")
    return PassesError(f"the weights hold no tensor {name!r}, which the graph reads")
