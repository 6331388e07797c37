"""Measure what weight formats of predictors cost: recall, precision, computed neurons and perplexity.

python -m benchmarks.cpu.predictor_formats MODEL [--quants f16,q4] [--tokens 8192] [--text FILE] [--json FILE]

Predictors are trained once, in float32 on a profile that is made first, and then packed in each format. For each format
of the other matrices (`--quants`), held-out text is read with every neuron, and with the neurons that the predictors
name. Rows whose format ends in `, refitted` have the thresholds that training would choose if it measured the rounded
predictor: on the samples of the profile that it measures on, as many firings are found as with f16.

`flips` is measured apart, with all formats on the same inputs: the neurons that a predictor in f16 names and the
rounded one does not (lost), and the reverse (gained), both as shares of those that f16 names.

Everything runs in PyTorch, layer by layer, in float32 with rounded weights. `--text` adds a text to the held-out one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from benchmarks.script import argument_parser, heading, row, write_json
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile.intervals import Estimate, block_size, estimate_mean, token_blocks
from picompile.predictors.accuracy import LayerAccuracy, first_windows, measure_layers
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import Profile
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.windows import held_out_windows
from picompile.predictors.store import Predictors
from picompile.predictors.train.candidates import split
from picompile.predictors.train.data import ROWS, layer_data, measure_curve, measure_firing
from picompile.predictors.train.options import TrainOptions
from picompile.predictors.train.run import train_predictors
from picompile.streaming import stream_windows
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import PREDICT
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.predictors import predictor_kind

Windows = Sequence[Sequence[int]]
# Of a text: the losses of each window's tokens but the first, in nats.
Losses = list[np.ndarray]


@dataclass(frozen=True)
class Bench:
    """A model with its predictors, and the texts that it reads."""

    captured: Captured
    profile: Profile
    predictors: Predictors
    texts: Mapping[str, Windows]

    @property
    def learned(self) -> list[int]:
        """The layers whose predictors have weights of their own."""
        return [layer.layer for layer in self.predictors.layers if layer.learned]

    def graph(self, insert: InsertPredictors, quant: str, form: str) -> GraphModule:
        """Return the graph with predictors, and its matrices packed but where they are in f16, as in the checkpoint."""
        predicted = insert(canonicalize(self.captured.graph_module)).graph_module
        return predicted if quant == "f16" else Quantize(quant, form)(predicted).graph_module

    def dense(self, quant: str) -> dict[str, list[Losses]]:
        """Return the losses on each text with every neuron, as the first of its list."""
        graph = self.graph(InsertPredictors("none"), quant, "auto")
        return {name: [losses(graph, self.captured.weights, windows)] for name, windows in self.texts.items()}

    def row(self, predictors: Predictors, quant: str, form: str, before: Mapping[str, list[Losses]]) -> dict[str, Any]:
        """Read each text with the neurons that `predictors` name.

        `before` has, for each text, the losses with every neuron; those of the first row, in f16, are added to it.
        """
        graph = self.graph(predictors.insert_pass(), quant, form)
        weights = predictors.weights(self.captured.weights, form if quant == "f16" else None)
        row: dict[str, Any] = {"row_bytes": predictor_bytes(predictors, form), "texts": {}}
        for name, windows in self.texts.items():
            layers = measure_layers(graph, weights, windows, self.profile.firing_rules)
            found = losses(graph, weights, windows)
            if len(before[name]) == 1:
                before[name].append(found)
            changes = [dataclasses.asdict(compare(other, found)) for other in before[name]]
            figures = layer_figures([layer for layer in layers if layer.layer in self.learned])
            row["texts"][name] = {"change": changes[0], "change_from_f16": changes[1], **figures}
        return row

    def flips(self, forms: Sequence[str]) -> dict[str, Any]:
        """Return, for each format, how predictions and scores differ from those of f16 on the same inputs."""
        graph = self.predictors.insert_pass()(canonicalize(self.captured.graph_module)).graph_module
        nodes = [node for node in calls(graph.graph, PREDICT) if predictor_kind(arguments(node)["kind"]).has_rank]
        found = {node: Flips(forms) for node in nodes}
        windows = next(iter(self.texts.values()))
        weights = self.predictors.weights(self.captured.weights)
        stream_windows(graph, weights, windows, nodes=tuple(found), replace={n: f.predict for n, f in found.items()})
        return {form: joined([each.figures(form) for each in found.values()]) for form in forms}

    def refitted(self, form: str) -> Predictors:
        """Return the predictors with the thresholds at which, packed in `form`, they find what f16 finds."""
        graph, layers = canonicalize(self.captured.graph_module), []
        profiles = {each.layer: each for each in self.profile.layers}
        for layer in self.predictors.layers:
            if not layer.learned:
                layers.append(layer)
                continue
            numbers = [n for n in (layer.layer, layer.layer - 1) if n in profiles]
            samples = {n: (self.profile.samples(n), profiles[n].place) for n in numbers}
            rule = self.profile.firing_rules[layer.layer]
            data = layer_data(graph, self.captured.weights, layer.layer, samples, rule)
            _, test = split(len(data.samples))
            contribution = measure_firing(data, test).contribution
            fc1, fc2, bias = (self.predictors.tensor(layer.layer, part).float() for part in ("fc1", "fc2", "bias"))
            fc1, fc2 = rounded(fc1, form), rounded(fc2, form)

            blocks = (
                (F.linear(F.linear(data.inputs(layer.input or "block", rows), fc1), fc2, bias), contribution[rows])
                for rows in (slice(at, min(at + ROWS, test.stop)) for at in range(test.start, test.stop, ROWS))
            )
            point = measure_curve(blocks).at(layer.weighted_recall or 0.997)
            layers.append(dataclasses.replace(layer, threshold=point.threshold))
        return dataclasses.replace(self.predictors, layers=tuple(layers))


class Flips:
    """Predicts with a predictor in f16, and counts how those in other formats differ."""

    def __init__(self, forms: Sequence[str]) -> None:
        self._forms = forms
        self._named, self._squares = 0, 0.0
        self._counts = {form: torch.zeros(3, dtype=torch.float64) for form in forms}

    def predict(self, x: Tensor, weights: list[Tensor], kind: str, threshold: float) -> Tensor:
        """Return the mask of the predictor in f16."""
        fc1, fc2, bias = weights
        scores = F.linear(F.linear(x, fc1), fc2, bias)
        mask = scores > threshold
        self._named += int(mask.sum())
        # Scores of one neuron spread around their mean; what differs between neurons is the bias's.
        self._squares += float((scores - bias).double().square().sum())
        for form in self._forms:
            other = F.linear(F.linear(x, rounded(fc1, form)), rounded(fc2, form), bias)
            named = other > threshold
            counts = (mask & ~named).sum(), (named & ~mask).sum(), (other - scores).double().square().sum()
            self._counts[form] += torch.stack([torch.as_tensor(float(count)) for count in counts]).double()
        return mask

    def figures(self, form: str) -> dict[str, float]:
        lost, gained, squares = self._counts[form].tolist()
        named = max(1, self._named)
        return {"lost": lost / named, "gained": gained / named, "error": math.sqrt(squares / self._squares)}


def rounded(matrix: Tensor, form: str) -> Tensor:
    """Return the values that `matrix` has in `form`."""
    return dequantize_rows(quantize_rows(matrix, form), form, matrix.shape[1])


def losses(graph: GraphModule, weights: Any, windows: Windows) -> Losses:
    """Return the losses of each window's tokens but the first, in nats."""
    found: Losses = []

    def observe(_: Node, logits: Tensor) -> None:
        targets = torch.tensor(list(windows[len(found)])[1:])
        found.append(F.cross_entropy(logits[:-1].double(), targets, reduction="none").numpy())

    stream_windows(graph, weights, windows, observe)
    return found


def compare(dense: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Estimate:
    """Return the share by which perplexity rises, with its 95 % confidence interval."""
    lengths = [len(each) for each in other]
    blocks = token_blocks(lengths, block_size(lengths))
    return estimate_mean(np.concatenate(other) - np.concatenate(dense), blocks).map(math.expm1)


def predictor_bytes(predictors: Predictors, form: str) -> int:
    """Return the bytes of the matrices of all predictors, padding included."""
    shapes = (
        predictors.headers[f"layers.{layer.layer}.{part}"].shape
        for layer in predictors.layers
        if layer.learned
        for part in ("fc1", "fc2")
    )
    return sum(rows * FORMATS[form].row_bytes(columns) for rows, columns in shapes)


def layer_figures(layers: Sequence[LayerAccuracy]) -> dict[str, Any]:
    """Return means over layers, and the worst of them."""

    def mean(value: Callable[[LayerAccuracy], float]) -> float:
        return sum(map(value, layers)) / len(layers)

    fired = sum(layer.firing_share for layer in layers)
    computed = sum(layer.computed_share for layer in layers)
    found = sum(layer.recall * layer.firing_share for layer in layers)
    return {
        "recall": found / fired,
        "lowest_recall": min(layer.recall for layer in layers),
        "weighted_recall": mean(lambda layer: layer.weighted_recall),
        "lowest_weighted_recall": min(layer.weighted_recall for layer in layers),
        "precision": found / computed,
        "lowest_precision": min(layer.precision for layer in layers),
        "firing_share": fired / len(layers),
        "computed_share": computed / len(layers),
        "layers": [dataclasses.asdict(layer) for layer in layers],
    }


def joined(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the layers, and its largest."""
    names = figures[0]
    means = {name: sum(each[name] for each in figures) / len(figures) for name in names}
    return means | {f"most_{name}": max(each[name] for each in figures) for name in names}


def show_flips(flips: Mapping[str, Mapping[str, float]]) -> None:
    print(f"\n{heading('predictors', 'lost', 'gained', 'most lost', 'error of scores', 'most')}")
    for form, each in flips.items():
        cells = [each[name] for name in ("lost", "gained", "most_lost", "error", "most_error")]
        print(row(form, *(f"{cell:.3%}" for cell in cells)), flush=True)


COLUMNS = ("recall", "lowest_recall", "weighted_recall", "lowest_weighted_recall", "precision", "computed_share")


def show_heading() -> None:
    print(f"\n{heading('weights', 'predictors', 'text', *COLUMNS, 'perplexity', 'beside f16', 'MB')}", flush=True)


def show(quant: str, name: str, figures: Mapping[str, Any]) -> None:
    for text, each in figures["texts"].items():
        cells = [f"{each[column]:.2%}" for column in COLUMNS]
        for change in (each["change"], each["change_from_f16"]):
            reach = "" if change["low"] is None else f" ± {(change['high'] - change['low']) / 2:.3%}"
            cells.append(f"{change['value']:+.3%}{reach}")
        print(row(quant, name, text, *cells, f"{figures['row_bytes'] / 1e6:.2f}"), flush=True)


def main() -> None:
    parser = argument_parser(
        __doc__, "model", "--json", work=Path("build/bench-predictor-formats"), profile_tokens=65_536, samples=32_768
    )
    parser.add_argument("--quants", default="f16,q4", help="formats of the other matrices, with commas")
    parser.add_argument("--formats", default="q8,q6,q4m,q4", help="formats of predictors beside f16, with commas")
    parser.add_argument("--refit", default="q4m,q4", help="formats to choose thresholds for anew, with commas")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text, at most")
    parser.add_argument("--text", type=Path, action="append", default=[], help="another text to read; repeatable")
    parser.add_argument("--rank", type=int, help="of all layers; default: chosen within 6 %% of the parameters")
    parser.add_argument("--learned-only", action="store_true", help="no exact predictors")
    given = parser.parse_args()
    work = given.work / given.model.stem
    work.mkdir(parents=True, exist_ok=True)
    counts = ProfileOptions(tokens=given.profile_tokens, samples=given.samples)
    profile = profile_model(given.model, work / "profile", counts)
    options = TrainOptions(
        exact=not given.learned_only,
        accuracy_bound=None,
        ranks=given.rank,
        budget=1.0 if given.rank else 0.06,
        overwrite=True,
    )
    folder = work / ("predictors" if given.rank is None else f"predictors-{given.rank}")
    predictors = train_predictors(given.model, profile, folder, options)
    texts = {"library": first_windows(profile.held_out(), given.tokens)}
    for text in given.text:
        windows, _ = held_out_windows(given.model, (text,), given.tokens)
        texts[text.name] = first_windows(windows, given.tokens)
    bench = Bench(load_model(given.model), profile, predictors, texts)
    ranks = [layer.rank if layer.rank is not None else layer.kind for layer in predictors.layers]
    tokens = ", ".join(f"{sum(map(len, windows))} tokens of {name}" for name, windows in texts.items())
    print(f"{given.model.name}: ranks {', '.join(map(str, ranks))}; {tokens}")
    forms = given.formats.split(",")
    result: dict[str, Any] = {"ranks": ranks, "flips": bench.flips(forms)}
    show_flips(result["flips"])
    show_heading()
    rows: dict[str, Any] = {}
    again = {form: bench.refitted(form) for form in given.refit.split(",") if form}
    for quant in given.quants.split(","):
        dense = bench.dense(quant)
        for form in ("f16", *forms):
            rows[f"{quant} {form}"] = bench.row(predictors, quant, form, dense)
            show(quant, form, rows[f"{quant} {form}"])
        for form, others in again.items():
            rows[f"{quant} {form} refitted"] = bench.row(others, quant, form, dense)
            show(quant, f"{form}, refitted", rows[f"{quant} {form} refitted"])
    write_json(given.json, result | {"rows": rows})


if __name__ == "__main__":
    main()
