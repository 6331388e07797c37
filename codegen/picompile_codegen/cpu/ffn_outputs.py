"""Outputs of the neurons that several tokens compute, each its own.

A neuron's rows of gate and up are read once, for all tokens that compute it: they are multiplied with a few of these at
a time, as `token_vectors.py` does where every token needs every row. So each output has the bits that it has alone.
Rows of down are added token by token (`ffn_slices.py`): which ones share a scale depends on the token.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.ffn_neurons import FfnArguments
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop, minimum, parallel, select
from picompile_codegen.cpu.token_vectors import TokenVectors, each_exact_tile

# So few tokens hardly share neurons, and the rows of a neuron are read faster together than gate and up now and down
# later: where masks name a tenth, 2 tokens take 71 us for a block on two cores of a Zen 5 instead of 110, and 8 take as
# long.
FEW_TOKENS = 8
# Neurons whose tokens a task gathers.
_GATHERED = 256
# Neurons that a task computes.
_COMPUTED = 16


@dataclass(frozen=True)
class TokenLists:
    """The neurons that each of `tokens` tokens computes: the first `counts[t]` in row t of `neurons`, in order.

    neurons int32 [any, F], counts int32 [any]; `products` float32 [any, F] holds the products with the gating matrix
    where these decide.
    """

    tokens: Expr
    neurons: KernelTensor
    counts: KernelTensor
    products: KernelTensor | None

    def place(self, token: Expr, least: Expr) -> Expr:
        """Return how many neurons of a token's list are below `least`."""
        count, found, width = bind(self.counts[token]), counter(), self.neurons.columns
        for step in reversed([2**i for i in range(width.bit_length())]):
            after = bind(found[0] + step)
            # A place behind the list counts as too far, whatever is read there.
            last = bind(self.neurons[token, minimum(after, width) - 1])
            found[0] = select(tirx.And(after <= count, last < least), after, found[0])
        return bind(found[0])


@dataclass(frozen=True)
class TokenOutputs:
    """The neurons that some tokens compute, and their outputs.

    `neurons` int32 [F] begins with those that any token computes, in order. `tokens` uint8 [F, rows] begins with the
    tokens that compute a neuron, in order; `counts` int32 [F] tells how many do. `outputs` float32 [rows, F] is set for
    the neurons of each token.
    """

    neurons: KernelTensor
    tokens: KernelTensor
    counts: KernelTensor
    outputs: KernelTensor

    @classmethod
    def declare(cls, function: KernelFunction, arguments: FfnArguments) -> "TokenOutputs | None":
        """Declare the memory; None where tokens are few, or choose experts, limits decide row by row, or no row but
        down's is read."""
        rows, neurons = arguments.spec.rows, arguments.spec.neurons
        if rows <= FEW_TOKENS or arguments.spec.has_limits or arguments.spec.experts or not _rows_read(arguments):
            return None
        return cls(
            function.scratch("shared", "int32", neurons),
            function.scratch("sharing", "uint8" if rows <= 256 else "int32", neurons, rows),
            function.scratch("shares", "int32", neurons),
            function.scratch("outputs", "float32", rows, neurons),
        )

    def compute(self, arguments: FfnArguments, lists: TokenLists, vectors: TokenVectors) -> None:
        """Compute the outputs of the neurons that each token lists."""
        count = self._gather(lists)
        distance = -(-arguments.bundle.rows_ahead // _rows_read(arguments))
        with parallel((count + (_COMPUTED - 1)) // _COMPUTED) as task:
            first = bind(task * _COMPUTED)
            with loop(first, minimum(first + _COMPUTED, count)) as position:
                neuron, ahead = (
                    bind(self.neurons[place]) for place in (position, minimum(position + distance, count - 1))
                )
                self._compute(arguments, lists.products, vectors, neuron, ahead)

    def _gather(self, lists: TokenLists) -> Expr:
        """Find out which tokens compute each neuron. Return how many neurons any token computes."""
        neurons = self.neurons.columns
        with parallel(-(-neurons // _GATHERED)) as task:
            first = bind(task * _GATHERED)
            end = bind(minimum(first + _GATHERED, neurons))
            with loop(first, end) as neuron:
                self.counts[neuron] = 0
            with loop(0, lists.tokens) as token:
                start, stop = (lists.place(token, least) for least in (first, end))
                with loop(start, stop) as place:
                    neuron = bind(lists.neurons[token, place])
                    count = bind(self.counts[neuron])
                    self.tokens[neuron, count] = tirx.Cast(self.tokens.dtype, token)
                    self.counts[neuron] = count + 1
        count = counter()
        with loop(0, neurons) as neuron:
            # Written whether any token computes it or not, and then kept or overwritten.
            self.neurons[count[0]] = neuron
            count[0] = count[0] + tirx.Cast("int32", self.counts[neuron] > 0)
        return bind(count[0])

    def _compute(
        self,
        arguments: FfnArguments,
        products: KernelTensor | None,
        vectors: TokenVectors,
        neuron: Expr,
        ahead: Expr,
    ) -> None:
        """Compute a neuron's output for each of its tokens, while the rows of neuron `ahead` are fetched."""
        spec = arguments.spec
        may_be_silent = spec.is_sparse and products is None

        def multiply(places: list[Expr]) -> None:
            tokens = [bind(tirx.Cast("int32", self.tokens[neuron, place])) for place in places]
            inputs = [vectors[token] for token in tokens]
            if products is None:
                firsts = arguments.first_products(neuron, inputs, ahead)
            else:
                firsts = [bind(products[token, neuron]) for token in tokens]
            ups = arguments.up_products(neuron, inputs, ahead)
            for token, first, up in zip(tokens, firsts, ups, strict=True):
                output = arguments.output_of_one(first, up)
                # Not a product: a silent neuron whose up is infinite must not turn into NaN.
                self.outputs[token, neuron] = select(first > spec.threshold, output, 0.0) if may_be_silent else output

        each_exact_tile(bind(self.counts[neuron]), multiply)


def _rows_read(arguments: FfnArguments) -> int:
    """Return how many rows of a neuron make its output."""
    return arguments.spec.bundle_parts - 1
