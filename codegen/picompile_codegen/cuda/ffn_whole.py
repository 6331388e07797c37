"""Feed-forward blocks that compute every neuron, with matrices in panels, on a GPU.

For one token, a block of threads multiplies a panel of gate, and one of up, with x; another launch multiplies down with
all neurons. For several tokens each matrix is a launch of its own, on tensor cores.
"""

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, when
from picompile_codegen.cuda.dot import BlockInput
from picompile_codegen.cuda.ffn import SUM_THREADS, sum_over_neurons
from picompile_codegen.cuda.ffn_hidden import add_counts, biased
from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.cuda.halves import Halves
from picompile_codegen.cuda.linear import multiply_halves
from picompile_codegen.cuda.matrix import CudaMatrix
from picompile_codegen.cuda.memory import Numbering, activate
from picompile_codegen.cuda.panels import PANEL_THREADS, panel_products
from picompile_codegen.specs import WholeFfnSpec
from picompile_passes.formats import PANEL_ROWS


@body(WholeFfnSpec)
def ffn_whole(spec: WholeFfnSpec, function: CudaFunction) -> None:
    """Write the launches of a `WholeFfnSpec`."""
    hidden = function.scratch("hidden", "float32", spec.rows, spec.neurons)
    if spec.rows == 1:
        _one_token(spec, function, hidden)
    else:
        _several_tokens(spec, function, hidden)


def _one_token(spec: WholeFfnSpec, function: CudaFunction, hidden: KernelTensor) -> None:
    gate, up = CudaMatrix.optional(function, "gate_w"), CudaMatrix.argument(function, "up_w")
    matrices = [matrix for matrix in (gate, up) if matrix is not None]
    with function.launch(grid=spec.neurons // PANEL_ROWS, block=PANEL_THREADS) as place:
        inputs = BlockInput(function["x"], 0, spec.dim, PANEL_THREADS)
        product = panel_products(matrices, inputs, place.block, place)
        # Threads past the first 16 compute what others do.
        neuron, is_first = bind(place.block * PANEL_ROWS + place.thread % PANEL_ROWS), place.thread < PANEL_ROWS
        value = bind(_first(spec, function, product(0), neuron))
        if gate is not None:
            value = bind(value * _second(spec, function, product(1), neuron))
        with when(is_first):
            hidden[0, neuron] = value
        if spec.counts:
            _, fired = Numbering(PANEL_THREADS).number(bind(tirx.And(is_first, value != 0.0)), place)
            with when(place.thread == 0):
                add_counts(function["stats"], PANEL_ROWS, fired)
    down, y, bias = CudaMatrix.argument(function, "down_w"), function["y"], function.get("down_bias")
    with function.launch(grid=spec.dim // PANEL_ROWS, block=PANEL_THREADS) as place:
        inputs = BlockInput(hidden, 0, spec.neurons, PANEL_THREADS)
        product = panel_products([down], inputs, place.block, place)
        with when(place.thread < PANEL_ROWS):
            output = bind(place.block * PANEL_ROWS + place.thread)
            y[0, output] = biased(product(0), bias, output)


def _several_tokens(spec: WholeFfnSpec, function: CudaFunction, hidden: KernelTensor) -> None:
    x = Halves.scratch(function, "halves", spec.rows, spec.dim)
    outputs = Halves.scratch(function, "outputs", spec.rows, spec.neurons)
    y, bias = function["y"], function.get("down_bias")

    def store_first(token: Expr, neuron: Expr, value: Expr) -> None:
        hidden[token, neuron] = _first(spec, function, value, neuron)

    def store_second(token: Expr, neuron: Expr, value: Expr) -> None:
        hidden[token, neuron] = hidden[token, neuron] * _second(spec, function, value, neuron)

    def store_output(token: Expr, output: Expr, value: Expr) -> None:
        y[token, output] = biased(value, bias, output)

    x.write(function, function["x"])
    if spec.gated:
        multiply_halves(function, x, CudaMatrix.argument(function, "gate_w"), store_first)
        multiply_halves(function, x, CudaMatrix.argument(function, "up_w"), store_second)
    else:
        multiply_halves(function, x, CudaMatrix.argument(function, "up_w"), store_first)
    if spec.counts:
        _count(spec, function, hidden)
    outputs.write(function, hidden)
    multiply_halves(function, outputs, CudaMatrix.argument(function, "down_w"), store_output)


def _first(spec: WholeFfnSpec, function: CudaFunction, product: Expr, neuron: Expr) -> Expr:
    """Return the activation of a neuron's product with gate, or with up where there is no gate."""
    bias = function.get("gate_bias" if spec.gated else "up_bias")
    return activate(spec.activation, biased(product, bias, neuron))


def _second(spec: WholeFfnSpec, function: CudaFunction, product: Expr, neuron: Expr) -> Expr:
    """Return the activation of a neuron's product with up, where there is a gate."""
    return activate(spec.up_activation, biased(product, function.get("up_bias"), neuron))


def _count(spec: WholeFfnSpec, function: CudaFunction, hidden: KernelTensor) -> None:
    """Write the launch that counts neurons: a block has a token."""
    with (
        function.launch(grid=spec.rows, block=SUM_THREADS) as place,
        when(place.block < function.tokens(spec.rows)),
    ):
        fired = sum_over_neurons(hidden, spec.neurons, lambda value: tirx.Cast("float32", value != 0.0), place)
        with when(place.thread == 0):
            add_counts(function["stats"], spec.neurons, tirx.Cast("int32", fired))
