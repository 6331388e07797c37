"""How each kind of predictor becomes a kernel call: one function a kind, and the table of them.

Masks are for decoding, of one sequence or of several. The functions that read prompts compute every neuron, since some
token needs almost every one; `lower` gives them no predictors.

A package that offers a predictor kind offers its kernel, too: an entry point of the group `picompile.predictor_kernels`
has the kind's name and leads to a `Lowering`. That appends calls to the function, the last of which writes the buffer
that `mask_buffer` gave it; `_low_rank` below is one. The block behind it then follows the mask.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

import torch
from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.function import Bindings, Function, dimension
from picompile_codegen.program import Arg, tensor_bytes
from picompile_codegen.signs import sign_row_bytes
from picompile_passes.errors import RegistryError, UnsupportedGraphError
from picompile_passes.nodes import arguments
from picompile_passes.predictor_kinds import sign_limit

ENTRY_POINT_GROUP = "picompile.predictor_kernels"

# lowering(predict, function)
Lowering = Callable[[Node, Function], None]

# `exact` is part of the block's kernel, `none` of no kernel.
_WITHOUT_KERNEL = ("exact", "none")


def lower_predict(node: Node, function: Function) -> None:
    """Appends the calls that make a mask of one token, where the block's own kernel does not decide by itself.

    Raises `UnsupportedGraphError` for a kind without a kernel, `RegistryError` for a package's that does not import.
    """
    if makes_mask(node, function.rows):
        kind = arguments(node)["kind"]
        _lowering(node, kind)(node, function)


def makes_mask(node: Node, rows: int) -> bool:
    """Whether there is a kernel for what `node` predicts for so many tokens."""
    kind = arguments(node)["kind"]
    # A package's kernel is for one token: several compute every neuron.
    return kind in _LOWERINGS or (rows == 1 and kind not in _WITHOUT_KERNEL)


def mask_buffer(node: Node, function: Function) -> Arg:
    """A new buffer uint8 [rows, neurons] for the mask that `node` predicts: 1 for a neuron to compute, 0 for others."""
    return function.result(node, "uint8")


def _lowering(node: Node, kind: str) -> Lowering:
    if kind in _LOWERINGS:
        return _LOWERINGS[kind]
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=kind))
    if not points:
        raise UnsupportedGraphError(f"{node.name}: there is no CPU kernel for predictor kind {kind!r}")
    if len(points) > 1:
        offers = " and ".join(point.value for point in points)
        raise RegistryError(f"two packages offer a kernel for predictor kind {kind!r}: {offers}")
    try:
        lowering: Lowering = points[0].load()
    except Exception as error:
        raise RegistryError(f"{points[0].value}, for predictor kind {kind!r}, does not import: {error}") from error
    return lowering


def _low_rank(relu: bool) -> Lowering:
    def lower(node: Node, function: Function) -> None:
        values, weights = arguments(node), function.shared.weights
        fc1, fc2, bias = values["weights"]
        first, second = weights.matrix(fc1), weights.matrix(fc2)
        kernel = function.kernel(
            kernels.predict_low_rank,
            formats=(first.format, second.format),
            neurons=second.rows,
            rank=first.rows,
            dim=dimension(values["x"]),
            relu=relu,
            rows=function.rows,
        )
        bindings: Bindings = {
            "x": function.value(values["x"]),
            "fc1": first,
            "fc2": second,
            "bias": weights.vector(bias),
            "threshold": _number(float(values["threshold"]), function),
            "mask": mask_buffer(node, function),
        }
        read = first.bytes + second.bytes + tensor_bytes("float32", (second.rows,))
        function.call(kernel, bindings, op="predict", layer=node.meta["layer"], weight_bytes=read)

    return lower


def _signs(node: Node, function: Function) -> None:
    values = arguments(node)
    (matrix,) = values["weights"]
    neurons, dim = (int(size) for size in matrix.meta["val"].shape)
    row_bytes = sign_row_bytes(dim)
    kernel = function.kernel(kernels.predict_signs, neurons=neurons, dim=dim, row_bytes=row_bytes, rows=function.rows)
    bindings: Bindings = {
        "x": function.value(values["x"]),
        "signs": function.shared.weights.signs(matrix),
        # It fires where more columns agree than the limit.
        "most": _number(dim - sign_limit(dim, values["threshold"]) - 1, function),
        "mask": mask_buffer(node, function),
    }
    function.call(kernel, bindings, op="predict", layer=node.meta["layer"], weight_bytes=neurons * row_bytes)


def _number(value: float, function: Function) -> Arg:
    """A number that kernels read: layers differ in it, and share the kernel all the same."""
    return function.shared.weights.computed(f"number.{value!r}", (1,), lambda _: torch.tensor([value]))


_LOWERINGS: dict[str, Lowering] = {
    "learned": _low_rank(relu=False),
    "learned-relu": _low_rank(relu=True),
    "sign": _signs,
}
