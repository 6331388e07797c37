"""Evaluation: the perplexity of an artifact, its distance from the dense model, and how sparsely its neurons fired."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from picompile.errors import UsageError
from picompile.frontend.activation import check_activation
from picompile.frontend.hf import load_model
from picompile.loading import load_engine
from picompile.products import fast_products
from picompile.progress import NoProgress, Progress
from picompile.streaming import streamed_perplexity
from picompile_passes.passes.canonicalize import canonicalize
from picompile_runtime import Engine, Tokenizer
from picompile_runtime.bench.perplexity import perplexity

# Firing is counted in decode steps only; so many are enough to see it where the text itself is read in chunks.
_FIRING_TOKENS = 128
_FROM_CHECK = ("recall", "weighted_recall", "precision", "rank")


def evaluate(
    artifact: Path,
    text: str,
    *,
    against: Path | None = None,
    max_tokens: int | None = None,
    window: int | None = None,
    by_decode: bool = False,
    threads: int | None = None,
    replan: bool = False,
    activation: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return what `eval --json` prints: perplexity on `text`, its distance from the dense model, and how neurons fired.

    Args:
        artifact: the artifact that reads the text.
        text: the text.
        against: a checkpoint to compare with; None compares with nothing.
        max_tokens: how much of the text is read at most; None reads all.
        window: how many tokens are read together; None takes the artifact's context.
        by_decode: whether tokens are read as when the model generates, with predicted neurons.
        threads: how many threads compute; None lets the runtime choose.
        replan: whether weights may be placed anew where the GPU has less memory than the plan needs.
        activation: the activation of `against`, as `load_model` takes it; None takes what its config.json says.
        progress: is told of each step.

    Raises:
        UsageError: `against` has another vocabulary, or is missing beside an activation. The runtime and capture raise
            errors of their own.
    """
    _check_activation(activation, against)

    progress = progress or NoProgress()
    with load_engine(artifact, threads, replan, progress) as engine:
        ids = Tokenizer.of(engine.artifact).encode(text)[:max_tokens]
        window = window or engine.context
        with progress.step("artifact", len(ids) - 1) as advance:
            measured = perplexity(engine, ids, window, by_decode, progress=_counter(advance))
        layers = _layers(engine, ids, measure=not by_decode)
        described = {**engine.artifact.manifest.model, "vocab": engine.vocab}
    dense = None
    if against is not None:
        dense = _dense_perplexity(against, activation, ids, window, artifact=described, progress=progress)
    return {
        "perplexity": measured.perplexity,
        "dense_perplexity": dense,
        "relative_change": None if dense is None else measured.perplexity / dense - 1,
        "tokens": measured.tokens,
        "layers": layers,
    }


def _counter(advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """Return a function that tells `advance` by how much the first of its arguments has grown since the last call."""
    counted = 0

    def count(done: int, total: int) -> None:
        nonlocal counted
        advance(done - counted)
        counted = done

    return count


def _check_activation(activation: str | None, against: Path | None) -> None:
    check_activation(activation)
    if activation is not None and against is None:
        raise UsageError("--activation applies to the model of --against; name that model, or leave this out")


def _layers(engine: Engine, ids: Sequence[int], *, measure: bool) -> list[dict[str, Any]]:
    """Return the predictor kind, and shares of the neurons computed and firing, of each feed-forward part.

    Recall, precision and rank are those that the accuracy check measured when the artifact was made; None without one.
    A neuron that a lossy predictor leaves out is not known to fire: `firing_share` counts among the computed ones.
    """
    if measure:
        engine.reset()
        engine.reset_firing()
        for token in ids[: min(_FIRING_TOKENS, engine.context)]:
            engine.decode(token)
    report = engine.artifact.json("report.json")
    kinds = {row["stats_row"]: row["predictor"] for row in report.get("ffn", ())}
    checked = {row["layer"]: row for row in report.get("accuracy", {}).get("layers", ())}
    return [
        {
            "layer": row.part.layer,
            "part": row.part.part,
            "kind": kinds.get(row.part.stats_row, "unknown"),
            "computed_share": row.computed_share,
            "firing_share": row.fired_share,
            **{name: checked.get(row.part.layer, {}).get(name) for name in _FROM_CHECK},
        }
        for row in engine.firing("all")
    ]


@fast_products()
def _dense_perplexity(
    model: Path,
    activation: str | None,
    ids: Sequence[int],
    window: int,
    artifact: Mapping[str, Any],
    progress: Progress,
) -> float:
    """Return a checkpoint's perplexity in eager PyTorch: every neuron, and its own weights as float32, layer by layer.

    Windows are those of `picompile_runtime.bench.perplexity`, and `activation` is what `load_model` takes. `progress`
    is told if the checkpoint has another one than `artifact`, the model as the artifact describes it.

    Raises `UsageError` where the vocabulary is another.
    """
    with progress.step("capture the dense model"):
        captured = load_model(model, activation)
        graph_module = canonicalize(captured.graph_module)
    vocabulary, own, computed = captured.facts.vocab, captured.facts.activation, artifact.get("activation")
    if vocabulary != artifact["vocab"]:
        raise UsageError(f"{model}: has {vocabulary} tokens, the artifact {artifact['vocab']}: another model")
    if computed not in (None, own):
        progress.say(
            f"{model} computes {own}, the artifact {computed}: give the --activation that it was compiled with"
        )
    windows = [ids[start : start + window + 1] for start in range(0, len(ids) - 1, window)]
    return streamed_perplexity(graph_module, captured.weights, windows, progress)
