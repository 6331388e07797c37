"""Feed-forward blocks of experts, with matrices in panels: for any number of tokens, to the same bits.

A pair is a token and an expert that it chose. Pairs are in the order of experts, and of tokens among those of an
expert: so the pairs of an expert are a run, which is multiplied with a panel of the expert at a time. A panel is read
once for all tokens that chose its expert.

A task of the first step computes the neurons of a panel for the pairs of its expert. One of the second adds up the
outputs of a panel's rows for all tokens, expert after expert: each sum is of one task, in the order of experts.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import KernelMatrix
from picompile_codegen.cpu.panel_matrix import PanelMatrix
from picompile_codegen.cpu.panel_neurons import PanelNeurons
from picompile_codegen.cpu.panel_products import (
    PanelInputs,
    TokenRun,
    multiply_panel,
    panel_inputs,
    panels_of_task,
    quantize_tokens,
)
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, parallel, select, worth_a_region
from picompile_codegen.cpu.token_experts import ChosenExperts, ExpertTokens
from picompile_codegen.cpu.vector import at, fma, splat
from picompile_codegen.specs.experts import ExpertsSpec
from picompile_passes.formats import PANEL_ROWS

# Tasks of an expert that follow one another.
_TASKS_TOGETHER = 4


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a call."""

    spec: ExpertsSpec
    gains: KernelTensor
    chosen: ChosenExperts
    shared: ExpertTokens

    @classmethod
    def declare(cls, spec: ExpertsSpec, function: KernelFunction) -> "_Pairs":
        """Declare memory for the pairs."""
        return cls(spec, function["gains"], ChosenExperts.declare(function, spec), ExpertTokens.declare(function, spec))

    @property
    def experts(self) -> KernelTensor:
        """The numbers of the experts that are in any pair, in order, int32 [experts + 1]; the last means nothing."""
        return self.shared.experts

    def find(self, tokens: Expr) -> tuple[Expr, Expr]:
        """List the pairs of the first `tokens` tokens. Return how many there are, and how many experts are in any."""
        with parallel(tokens, when_worth=self.spec.rows > 1) as token:
            self.chosen.find(self.gains, token)
        experts = self.shared.gather(self.chosen, tokens)
        return bind(self.shared.starts[experts]), experts

    def run(self, place: Expr, *, of_tokens: bool) -> TokenRun:
        """Return the pairs of the expert at `place`, whose inputs are rows of tokens, or else of pairs."""
        first = bind(self.shared.starts[place])
        # One token has one pair with an expert.
        count = 1 if self.spec.rows == 1 else bind(self.shared.starts[place + 1] - first)
        return TokenRun(count, first, self.token if of_tokens else lambda pair: pair)

    def token(self, pair: Expr) -> Expr:
        """Return the token of a pair."""
        return 0 if self.spec.rows == 1 else self.shared.tokens[pair]


@body(ExpertsSpec)
def experts(spec: ExpertsSpec, function: KernelFunction) -> None:
    """Write the body of an `ExpertsSpec`."""
    down, pairs = KernelMatrix.argument(function, "down_w"), _Pairs.declare(spec, function)
    neurons = PanelNeurons.declare(spec, function, spec.pairs, spec.expert_neurons)
    inner = panel_inputs(function, "hidden", spec.pairs, spec.expert_neurons, down, spec.activation_bytes)
    tokens = function.tokens(spec.rows)

    pair_count, expert_count = pairs.find(tokens)
    neurons.quantize(function["x"], tokens)
    _compute_neurons(spec, neurons, pairs, expert_count)
    if spec.counts:
        neurons.count(function["stats"], pair_count)
    quantize_tokens(neurons.hidden, pair_count, spec.expert_neurons, inner)
    _add_up(_Outputs(spec, function, PanelMatrix(down), inner), pairs, expert_count, tokens)


def _compute_neurons(spec: ExpertsSpec, neurons: PanelNeurons, pairs: _Pairs, experts: Expr) -> None:
    """Compute the outputs of all neurons of all pairs."""
    each = spec.expert_neurons // PANEL_ROWS
    count = panels_of_task(each, spec.rows)
    tasks = each // count
    # One token takes panels in the order of memory. With several, experts differ in their pairs: as few tasks as keep
    # the inputs of an expert in a cache follow one another, and then those of all other experts. So threads that begin
    # with equal runs of tasks have equal work.
    together = tasks if spec.rows == 1 else max(i for i in range(1, _TASKS_TOGETHER + 1) if tasks % i == 0)

    def place(task: Expr) -> tuple[Expr, Expr]:
        """Return the place of a task's expert, and the first panel of it that the task takes."""
        # TVM knows no sign of `experts`.
        block = bind(tirx.truncdiv(task, experts * together))
        rest = bind(task - block * (experts * together))
        return bind(rest // together), bind((block * together + rest % together) * count)

    with parallel(experts * tasks, when_worth=worth_a_region(neurons.bytes // spec.experts)) as task:
        (number, first), (next_number, next_first) = place(task), place(task + 1)
        expert = bind(pairs.experts[number])
        start = bind(expert * spec.expert_neurons)
        panel = bind(expert * each + first)
        behind = bind(pairs.experts[next_number] * each + next_first)
        run = pairs.run(number, of_tokens=True)
        neurons.compute((panel, count), run, lambda neuron: neuron - start, behind)


@dataclass(frozen=True)
class _Outputs:
    """The matrix down and its inputs, from which y is computed."""

    spec: ExpertsSpec
    function: KernelFunction
    down: PanelMatrix
    inputs: PanelInputs


def _add_up(outputs: _Outputs, pairs: _Pairs, experts: Expr, tokens: Expr) -> None:
    """Compute y of all tokens."""
    spec, function = outputs.spec, outputs.function
    y, gains = function["y"], function["gains"]
    down_bias, expert_bias = function.get("down_bias"), function.get("expert_bias")
    each = spec.dim // PANEL_ROWS
    count = panels_of_task(each, spec.rows)
    with parallel(each // count, when_worth=worth_a_region(outputs.down.matrix.bytes // spec.experts)) as task:
        first = bind(task * count)
        with loop(0, tokens) as token, loop(0, count) as i:
            columns = at(bind((first + i) * PANEL_ROWS), PANEL_ROWS)
            y[token, columns] = splat(0.0, PANEL_ROWS) if down_bias is None else down_bias[columns]
        with loop(0, experts) as number:
            expert = bind(pairs.experts[number])
            start = bind(expert * spec.dim)

            def add(
                pair: Expr, output: Expr, lanes: int, products: Expr, expert: Expr = expert, start: Expr = start
            ) -> None:
                token, columns = bind(pairs.token(pair)), at(bind(output - start), lanes)
                value = products if expert_bias is None else products + expert_bias[at(output, lanes)]
                gain = bind(splat(gains[token, expert], lanes))
                y[token, columns] = fma(gain, bind(value), y[token, columns], lanes)

            is_last = number + 1 == experts
            next_expert = bind(pairs.experts[select(is_last, 0, number + 1)])
            behind = bind(next_expert * each + first + select(is_last, count, 0))
            panel, run = bind(expert * each + first), pairs.run(number, of_tokens=False)
            multiply_panel(outputs.down, (panel, count), outputs.inputs, run, add, (outputs.down, behind))
