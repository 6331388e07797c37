"""Comparison of a model's predictors on held-out text: recall, cost and perplexity.

python -m benchmarks.cpu.predictors models/tiny-reglu [--work build/predictors] [--json FILE] [--ranks 24,32,48,64,80]

One profile, made from the standard library's code and documents, serves all rows:

- adaptive: as `compile --predictor learned` trains them, with a rank for each layer, exact where that is cheaper
- adaptive, learned only: without exact layers
- fixed: one rank for all layers, the same size in total, every missed firing counted alike, as PowerInfer has it
- sign: the signs of the weights, no training

All must have the same recall by contribution on the samples, 99.7 %. Perplexity, recall and the computed neurons are
then measured on held-out text. `--ranks` draws the trade-off: each row has one rank for all layers, trained as the
adaptive ones. Results in the work folder are not made again. At the end, predictors made from code alone and from
documents alone are measured on both.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.script import argument_parser, heading, row, write_json
from picompile.frontend.hf import load_model
from picompile.predictors.accuracy import first_windows, measure_layers
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import Profile
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.text import CalibrationText, library_texts
from picompile.predictors.store import Predictors
from picompile.predictors.train.options import TrainOptions
from picompile.predictors.train.run import train_predictors
from picompile.streaming import streamed_perplexity
from picompile_passes.passes.canonicalize import canonicalize

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Bench:
    """A model and where its profiles and predictors are kept."""

    model: Path
    work: Path
    tokens: int

    def profile(self, name: str, options: ProfileOptions) -> tuple[Profile, float]:
        started = time.perf_counter()
        profile = profile_model(self.model, self.work / f"profile-{name}", options)
        return profile, time.perf_counter() - started

    def train(self, name: str, profile: Profile, options: TrainOptions) -> tuple[Predictors, float]:
        """Predictors of one `name` share their candidates: another choice of them is no training."""
        started = time.perf_counter()
        folder = self.work / f"predictors-{name}"
        predictors = train_predictors(self.model, profile, folder, dataclasses.replace(options, overwrite=True))
        return predictors, time.perf_counter() - started

    def measure(self, predictors: Predictors, windows: Windows, rules: Mapping[int, FiringRule]) -> dict[str, Any]:
        """Perplexity of the graph in eager PyTorch, float32, with every neuron and with those of the masks."""
        captured = load_model(self.model)
        dense = canonicalize(captured.graph_module)
        predicted = predictors.insert_pass()(dense).graph_module
        weights = predictors.weights(captured.weights)
        before = streamed_perplexity(dense, captured.weights, windows)
        after = streamed_perplexity(predicted, weights, windows)
        layers = measure_layers(predicted, weights, windows, rules)
        fired = sum(layer.firing_share for layer in layers)
        return {
            "parameters_share": predictors.parameters / captured.facts.parameters,
            "parameters": predictors.parameters,
            "recall": sum(layer.recall * layer.firing_share for layer in layers) / fired,
            "weighted_recall": sum(layer.weighted_recall for layer in layers) / len(layers),
            "lowest_weighted_recall": min(layer.weighted_recall for layer in layers),
            "computed_ratio": sum(layer.computed_share for layer in layers) / fired,
            "firing_share": fired / len(layers),
            "dense_perplexity": before,
            "perplexity": after,
            "relative_change": after / before - 1,
            "ranks": [layer.rank if layer.rank is not None else layer.kind for layer in layers],
        }


def main() -> None:
    parser = argument_parser(__doc__, "model", "--json", work=Path("build/bench-predictors"))
    parser.add_argument("--ranks", default="", help="ranks of the trade-off, with commas")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of held-out text, at most")
    given = parser.parse_args()
    work = given.work / given.model.name
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.model, work, given.tokens)
    ranks = [int(rank) for rank in given.ranks.split(",") if rank]
    result = {"model": str(given.model), **main_table(bench, ranks), "texts": other_text(bench)}
    write_json(given.json, result)


def main_table(bench: Bench, ranks: Sequence[int]) -> dict[str, Any]:
    profile, profile_s = bench.profile("both", ProfileOptions())
    windows = first_windows(profile.held_out(), bench.tokens)
    rules = profile.firing_rules
    rows: dict[str, dict[str, Any]] = {}
    show_heading()

    def add(name: str, options: TrainOptions, candidates: str) -> Predictors:
        predictors, train_s = bench.train(candidates, profile, options)
        rows[name] = bench.measure(predictors, windows, rules) | {"train_s": train_s}
        show(name, rows[name])
        return predictors

    add("adaptive", TrainOptions(), "both")
    learned = add("adaptive, learned only", TrainOptions(exact=False, accuracy_bound=None), "both")
    rank = max(1, learned.parameters // width(profile))
    add(
        f"fixed {rank}",
        TrainOptions(exact=False, accuracy_bound=None, ranks=rank, weighting="none", budget=1.0),
        "fixed",
    )
    add("sign", TrainOptions(kind="sign", exact=False, accuracy_bound=None), "sign")
    for rank in ranks:
        add(f"rank {rank}", TrainOptions(exact=False, accuracy_bound=None, ranks=rank, budget=1.0), f"rank-{rank}")
    print(f"profile {profile_s:.0f} s, adaptive predictors {rows['adaptive']['train_s']:.0f} s", flush=True)
    return {"profile_s": profile_s, "rows": rows}


def width(profile: Profile) -> int:
    """Parameters that one more rank costs in all layers together."""
    return sum(layer.neurons + profile.hidden for layer in profile.layers)


def other_text(bench: Bench) -> list[dict[str, Any]]:
    """Predictors made from code and from documents, each measured on held-out code and on held-out documents."""
    profiles = {}
    for kind in ("code", "documents"):
        options = ProfileOptions(calibration=texts(kind, held_out=False), held_out=texts(kind, held_out=True))
        profiles[kind] = bench.profile(kind, options)[0]
    found = []
    for made_from, profile in profiles.items():
        rules = profile.firing_rules
        for name, options in (
            ("adaptive", TrainOptions(accuracy_bound=None)),
            ("adaptive, learned only", TrainOptions(exact=False, accuracy_bound=None)),
        ):
            predictors, _ = bench.train(made_from, profile, options)
            for read, other in profiles.items():
                measured = bench.measure(predictors, first_windows(other.held_out(), bench.tokens), rules)
                show(f"{name}, from {made_from}, on {read}", measured)
                found.append({"kind": name, "made_from": made_from, "read": read, **measured})
    return found


def texts(kind: str, held_out: bool) -> tuple[CalibrationText, ...]:
    """The standard library's sources, or the topics of the language reference that it carries."""
    both = library_texts(held_out, seed=0)
    return tuple(text for text in both if text.source.startswith("topics/") == (kind == "documents"))


COLUMNS = (
    ("parameters", "parameters_share", "{:.2%}"),
    ("recall", "recall", "{:.2%}"),
    ("by contribution", "weighted_recall", "{:.2%}"),
    ("lowest layer", "lowest_weighted_recall", "{:.2%}"),
    ("computed/fired", "computed_ratio", "{:.2f}"),
    ("fired", "firing_share", "{:.1%}"),
    ("perplexity", "relative_change", "{:+.3%}"),
)


def show_heading() -> None:
    print(heading("predictors", *(title for title, _, _ in COLUMNS), "ranks"), flush=True)


def show(name: str, figures: Mapping[str, Any]) -> None:
    cells = (form.format(figures[key]) for _, key, form in COLUMNS)
    print(row(name, *cells, ", ".join(map(str, figures["ranks"]))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
