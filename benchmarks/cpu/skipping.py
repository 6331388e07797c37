"""Measure how much of a model can be skipped for a rise of perplexity, and what that gives in speed.

python -m benchmarks.cpu.skipping MODEL [--bounds 0.1% 1% 5%] [--work DIR] [--json FILE] [--plot FILE] [--speed]

For each bound the limits are found as `compile --skip` finds them, on calibration text, and then judged on held-out
text: its perplexity, the mean KL divergence from the model as it is, and the share of the weights of a token's
matrices that are not read. Beside it stands the oracle of the same methods: for each token it leaves out the share of
neurons whose outputs times the norms of their down rows are smallest, as if it knew them before it read up. `--ranked
0.1:0.25` sees no more than limits do: of each token it leaves out the tenth with the smallest gates, times the norms of
their rows of up and down, and then as many by their outputs as make a quarter. With `--speed` the model is compiled
with each bound and without any, and all artifacts are measured in turn.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from benchmarks.cpu.commands import picompile, picompile_json
from benchmarks.cpu.divergence import measure_loss
from benchmarks.script import argument_parser
from picompile.frontend.hf import load_model
from picompile.predictors.profile.windows import held_out_windows
from picompile.progress import NoProgress
from picompile.quantities import parse_share
from picompile.skipping.calibration import checkpoint_limits
from picompile.skipping.limits import no_limits, saved_weights, skipping_sites
from picompile.skipping.options import SkippingOptions
from picompile.skipping.search import count_left_out
from picompile.streaming import new_states, run_segment, split_layers
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import LINEAR, SPARSE_FFN, matrix_operands
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors

# Shares of neurons that the oracle leaves out.
ORACLE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Row:
    """A measurement: what is left out, and what that costs on held-out text.

    `skipped` is the share of the weights of a token's matrices, the head's included, that are not read.
    """

    name: str
    skipped: float
    perplexity: float
    relative_change: float
    kl_nats: float
    tokens_per_s: float | None = None
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class Bench:
    """A model with limits in its graph, and the windows that it is judged on."""

    graph_module: GraphModule
    weights: WeightSource
    windows: Sequence[Sequence[int]]

    def row(self, name: str, weights: WeightSource, replaced: Mapping[Node, Callable[..., Tensor]]) -> Row:
        """Read the text with the model as it is, and with calls computed in another way; `skipped` is 0."""
        loss = measure_loss(
            self.windows,
            lambda windows, first: self._whole[first : first + len(windows)],
            lambda windows: self._logits(weights, windows, replaced),
        )
        return Row(name, 0.0, loss.perplexity, loss.relative_change, loss.kl_nats)

    @cached_property
    def _whole(self) -> list[Tensor]:
        """The logits of the model as it is: 1.6 GB for 8,192 tokens and a vocabulary of 49,152."""
        return self._logits(no_limits(self.graph_module).weights(self.weights), self.windows, {})

    def _logits(
        self, weights: WeightSource, windows: Sequence[Sequence[int]], replaced: Mapping[Node, Callable[..., Tensor]]
    ) -> list[Tensor]:
        found: list[Tensor] = []
        states = new_states(self.graph_module, windows)
        nodes = self.graph_module.graph.output_node().all_input_nodes
        for segment in split_layers(self.graph_module):
            run_segment(segment, weights, states, lambda _, value: found.append(value), nodes, replace=replaced)
        return found

    @property
    def _all_weights(self) -> int:
        """The weights of the matrices that a token is multiplied with."""
        nodes = calls(self.graph_module.graph, LINEAR, SPARSE_FFN)
        return sum(matrix.meta["val"].numel() for node in nodes for matrix in matrix_operands(node))

    def limited(self, name: str, weights: WeightSource) -> Row:
        """Judge limits that `weights` has."""
        counts: dict[str, int] = {}
        row = self.row(name, weights, count_left_out(self.graph_module, counts))
        tokens, saved = sum(map(len, self.windows)), saved_weights(self.graph_module)
        skipped = 0.0
        for node in calls(self.graph_module.graph, SPARSE_FFN):
            gate, output = (arguments(node)[limit] for limit in ("gate_limits", "output_limits"))
            by_gate = counts[str(gate.target)] if gate is not None else 0
            if output is not None:
                skipped += (counts[str(output.target)] - by_gate) / tokens * saved[str(output.target)]
            if gate is not None:
                skipped += by_gate / tokens * saved[str(gate.target)]
        return replace(row, skipped=skipped / self._all_weights)

    def oracle(self, share: float) -> Row:
        """Judge what an oracle leaves out: up and down rows of neurons, or down alone where there is no gate."""
        replaced, skipped = {}, 0.0
        for node in calls(self.graph_module.graph, SPARSE_FFN):
            down = evaluate_constant(self.graph_module, arguments(node)["down"], self.weights)
            replaced[node] = _smallest_left_out(down.norm(dim=1), share)
            rows = 1 if arguments(node)["gate"] is None else 2
            skipped += int(share * len(down)) * rows * down.shape[1]
        whole = no_limits(self.graph_module).weights(self.weights)
        return replace(self.row(f"oracle {share:.0%}", whole, replaced), skipped=skipped / self._all_weights)

    def ranked(self, by_gate: float, at_all: float) -> Row:
        """Judge what ranking each token's gates, and then outputs, leaves out of gated blocks."""
        replaced, skipped = {}, 0.0
        for node in calls(self.graph_module.graph, SPARSE_FFN):
            up, down = (
                evaluate_constant(self.graph_module, arguments(node)[name], self.weights) for name in ("up", "down")
            )
            replaced[node] = _ranked_left_out(down.norm(dim=1), up.norm(dim=1), by_gate, at_all)
            skipped += (int(by_gate * len(down)) + int(at_all * len(down))) * down.shape[1]
        whole = no_limits(self.graph_module).weights(self.weights)
        name = f"ranked {by_gate:.0%} {at_all:.0%}"
        return replace(self.row(name, whole, replaced), skipped=skipped / self._all_weights)


def _ranked_left_out(down: Tensor, up: Tensor, by_gate: float, at_all: float) -> Callable[..., Tensor]:
    def block(*operands: Any, **named: Any) -> Tensor:
        values = SparseFfnOperands(*operands, **named)
        activated, _ = values.factors()
        hidden = values.outputs()
        for sizes, share in ((activated.abs() * up * down, by_gate), (hidden.abs() * down, at_all)):
            # What the gates leave out stays out: it is zero, and so among the smallest.
            left = sizes.masked_fill(hidden == 0, 0.0)
            smallest = left.topk(int(share * len(down)), dim=-1, largest=False).indices
            hidden = hidden.scatter(-1, smallest, 0.0)
        return torch.nn.functional.linear(hidden, values.down.transpose(0, 1), values.down_bias)

    return block


def _smallest_left_out(norms: Tensor, share: float) -> Callable[..., Tensor]:
    def block(*operands: Any, **named: Any) -> Tensor:
        values = SparseFfnOperands(*operands, **named)
        hidden = values.outputs()
        smallest = (hidden.abs() * norms).topk(int(share * len(norms)), dim=-1, largest=False).indices
        return torch.nn.functional.linear(
            hidden.scatter(-1, smallest, 0.0), values.down.transpose(0, 1), values.down_bias
        )

    return block


def oracle_share(row: Row, oracle: Sequence[Row]) -> float:
    """Return what a row skips as a share of what the oracle skips for the same KL divergence.

    Between two of the oracle's rows, what is skipped grows with the logarithm of the divergence: the divergence itself
    grows with a power of it.
    """
    for low, high in pairwise(oracle):
        if low.kl_nats <= row.kl_nats <= high.kl_nats:
            part = math.log(row.kl_nats / low.kl_nats) / math.log(high.kl_nats / low.kl_nats)
            return row.skipped / (low.skipped + part * (high.skipped - low.skipped))
    return math.nan


def measure_speed(
    model: Path, bounds: Sequence[str], skipping: Sequence[Any], quant: str, work: Path, rounds: int
) -> dict[str, Any]:
    """Compile with each bound and with none, and measure all artifacts in turn; medians by the bound.

    `skipping` has more options of `compile` for artifacts with a bound.
    """
    artifacts = {}
    for bound in ("none", *bounds):
        artifacts[bound] = work / f"artifact-{quant}-{bound.rstrip('%')}"
        if not artifacts[bound].exists():
            skip = () if bound == "none" else ("--skip", bound, "--work", work, *skipping)
            words = ("compile", model, "-o", artifacts[bound], "--quant", quant, "--rounding", "nearest")
            picompile(*words, "--context", 1024, *skip)
    results: dict[str, list[dict[str, Any]]] = {bound: [] for bound in artifacts}
    for _ in range(rounds):
        for bound, artifact in artifacts.items():
            measured = picompile_json("bench", artifact, "-p", 128, "-n", 128, "-r", 1, "-t", 2)
            results[bound].append(measured["decode"])
    return {
        bound: {key: statistics.median(each[key] for each in found) for key in ("tokens_per_s", "bytes_per_token")}
        for bound, found in results.items()
    }


def plot(rows: Sequence[Row], oracle: Sequence[Row], model: str, output: Path) -> None:
    """Draw what is skipped over the KL divergence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for found, marker, color, label in ((oracle, "s", "#9aa5b1", "oracle"), (rows, "o", "#1f6feb", "picompile")):
        axes.plot([100 * r.skipped for r in found], [r.kl_nats for r in found], marker=marker, color=color, label=label)
        for row in found:
            place = (100 * row.skipped, row.kl_nats)
            text = f"{row.name.removeprefix('oracle ')} ({100 * row.relative_change:+.1f} %)"
            axes.annotate(text, place, textcoords="offset points", xytext=(6, -10), fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("weights of a token that are not read, %")
    axes.set_ylabel("mean KL divergence, nats a token")
    axes.set_title(f"{model}: what skipping costs (in brackets: perplexity)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(output, dpi=120)


def main() -> None:
    """Measure every row."""
    parser = argument_parser(__doc__, "model", "--json", "--plot", work=Path("build/bench-skipping"), rounds=5)
    parser.add_argument("--bounds", nargs="*", default=["0.1%", "1%", "5%"])
    parser.add_argument("--oracle", nargs="*", type=float, default=list(ORACLE), help="shares that the oracle skips")
    parser.add_argument("--ranked", nargs="*", default=[], metavar="GATE:ALL", help="shares that ranking leaves out")
    parser.add_argument("--tokens", type=int, default=8_192, help="of held-out text")
    parser.add_argument("--skip-tokens", type=int, default=16_384, help="of calibration text")
    parser.add_argument("--at", nargs="*", default=[], help="places to skip")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--quant", default="q4")
    given = parser.parse_args()
    captured = load_model(given.model)
    canonical = canonicalize(captured.graph_module)
    graph = skipping_sites(canonical, given.at).insertion(InsertPredictors("none"))(canonical).graph_module
    windows, source = held_out_windows(given.model, tokens=given.tokens)
    print(f"{given.model}, {sum(map(len, windows))} tokens of {source}")
    bench = Bench(graph, captured.weights, windows)
    oracle = [bench.oracle(share) for share in given.oracle]
    ranked = [bench.ranked(*map(float, shares.split(":"))) for shares in given.ranked]
    for row in (*oracle, *ranked):
        show(row)
    rows = []
    for bound in given.bounds:
        options = SkippingOptions(parse_share(bound, "--bounds"), tokens=given.skip_tokens)
        folder = given.work / "skipping"
        found = checkpoint_limits(given.model, graph, captured.weights, folder, options, NoProgress())
        row = bench.limited(bound, found.limits.weights(captured.weights))
        rows.append(row)
        show(row, f"{oracle_share(row, oracle):.0%} of the oracle's")
    skipping = ["--skip-tokens", given.skip_tokens, *(word for place in given.at for word in ("--skip-at", place))]
    speeds = (
        measure_speed(given.model, given.bounds, skipping, given.quant, given.work, given.rounds) if given.speed else {}
    )
    rows = [replace(row, **speeds.get(row.name, {})) for row in rows]
    for bound, speed in speeds.items():
        whole = speeds["none"]
        bytes_share = speed["bytes_per_token"] / whole["bytes_per_token"]
        print(
            f"{bound:8} {speed['tokens_per_s']:7.1f} tokens/s, {speed['bytes_per_token'] / 1e6:6.1f} MB a token: "
            f"{speed['tokens_per_s'] / whole['tokens_per_s']:.3f} times as fast for {bytes_share:.3f} of the bytes"
        )
    if given.json:
        content = {"model": str(given.model), "rows": rows, "oracle": oracle, "ranked": ranked}
        given.json.write_text(json.dumps(content, indent=1, default=asdict) + "\n")
    if given.plot:
        plot(rows, oracle, given.model.name, given.plot)


def show(row: Row, more: str = "") -> None:
    """Print a row."""
    print(
        f"{row.name:12} skips {100 * row.skipped:6.2f} % {row.perplexity:9.4f} {100 * row.relative_change:+8.3f} % "
        f"KL {row.kl_nats:.5f} {more}",
        flush=True,
    )


if __name__ == "__main__":
    main()
