"""The driver's steps that decide about weights: limits of neurons, a format for each matrix, and rounding.

Weights are rounded once, before a plan tells which neurons are where.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.fx import GraphModule

from picompile.choices import FOUR_BITS, STORED, base_format, is_budget, parse_bits
from picompile.compile.four_bits import choose_four_bits
from picompile.compile.passes import (
    all_passes,
    compilation_passes,
    insert_pass,
    insert_passes,
    quantize_pass,
    run_passes,
)
from picompile.compile.plan import fits_in_whole_blocks, may_compute_whole_blocks
from picompile.config import CompileConfig
from picompile.errors import UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.facts import has_experts
from picompile.frontend.stored.choice import choose_stored
from picompile.predictors.predictor_set import PredictorSet
from picompile.progress import Progress
from picompile.rounding import checkpoint_formats, round_checkpoint
from picompile.skipping.calibration import checkpoint_limits
from picompile.skipping.limits import skipping_sites
from picompile.skipping.options import SENSITIVITY_TOKENS
from picompile_passes.formats import COARSE_BITS, FORMATS, head_format
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.quantize import Quantize

# Twice the mean error of float16's last digit, squared, is below it.
_SILENT_LOSS = 1e-6
# Matrices, and rows of each, by which the loss of a second rounding is measured.
_MEASURED_MATRICES = 4
_MEASURED_ROWS = 64


def warn_of_rounding(captured: Captured, quant: str, progress: Progress, *, by_neurons: bool) -> None:
    """Tell `progress` if weights are quantized already and `quant` rounds them a second time, and what that costs.

    With `by_neurons` down projections are rounded again where other matrices are not: an artifact has a row for each
    neuron. Nothing is said of what is lost in the digits of float16.
    """
    rounds_again: Callable[..., str | None] | None = getattr(captured.weights, "rounds_again", None)
    if rounds_again is None:
        return
    shapes = {name: captured.weights.shape(name) for name in captured.weights.names()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and captured.facts.vocab not in shape]
    down = [name for name in matrices if shapes[name] == (captured.facts.hidden, captured.facts.ffn)]
    what, stored, names = "most weights", rounds_again(quant), matrices
    if stored is None and by_neurons and captured.facts.hidden != captured.facts.ffn:
        what, stored, names = "down projections", rounds_again(quant, transposed=True), down
    loss = 0.0 if stored is None else _rounding_loss(captured.weights, names, quant, transposed=names is down)
    if loss < _SILENT_LOSS:
        return
    better = "; --quant q4m or q8 keeps them closer to what they are"
    progress.say(
        f"{what} of the model are {stored}, which {quant} rounds a second time, with a relative squared error of "
        f"{loss:.2g}{better if FORMATS[quant].bits <= COARSE_BITS else ''}"
    )


def _rounding_loss(weights: WeightSource, names: Sequence[str], quant: str, transposed: bool) -> float:
    """Return the relative squared error of `quant`, rounded to nearest: Σ (rounded - weight)² / Σ weight².

    It is that of some rows of some of the matrices `names`, spread over the model; rows that can be packed as they are
    have none.
    """
    packed: Callable[[str, str, bool], object] = getattr(weights, "packed", lambda *_: None)
    error = total = 0.0
    for name in names[:: max(1, len(names) // _MEASURED_MATRICES)][:_MEASURED_MATRICES]:
        matrix = weights.load(name)
        rows = (matrix.T if transposed else matrix)[:_MEASURED_ROWS].to(torch.float32)
        total += float(rows.square().sum())
        if packed(name, quant, transposed) is None:
            rounded = dequantize_rows(quantize_rows(rows, quant), quant, rows.shape[1])
            error += float((rounded - rows).square().sum())
    return error / total if total else 0.0


def choose_limits(
    checkpoint: Path | None,
    captured: Captured,
    config: CompileConfig,
    predictors: PredictorSet | None,
    scratch: Path,
    progress: Progress,
) -> tuple[CompileConfig, Captured]:
    """Return `config` and the model with the limits below which it leaves out neurons, where `config` asks for them.

    The arguments are those of `round_weights`.

    Raises:
        UsageError: the text cannot be used, the model is a module in memory, or nothing of it can be skipped.
        UnsupportedModelError: the model's logits are not finite numbers.
    """
    if config.skip is None:
        return config, captured
    if checkpoint is None:
        raise UsageError("skip needs a model folder, whose tokenizer reads text; leave it out")
    canonical = run_passes(captured, CANONICALIZE, progress, verify=config.verify)
    sites = skipping_sites(canonical, config.skip_at)
    insert = [sites.insertion(insert_pass(config, predictors))]
    graph_module = run_passes(replace(captured, graph_module=canonical), insert, progress, verify=config.verify)
    weights = _weights_of(captured, predictors)
    folder = _work(config, scratch) / "skipping"
    text = config.text(config.skip_tokens + SENSITIVITY_TOKENS)
    found = checkpoint_limits(
        checkpoint, graph_module, weights, folder, options=text, bound=config.skip, progress=progress
    )
    limited = replace(captured, weights=found.limits.weights(captured.weights))
    return replace(config, limits=found), limited


def choose_formats(
    checkpoint: Path | None,
    captured: Captured,
    config: CompileConfig,
    predictors: PredictorSet | None,
    scratch: Path,
    progress: Progress,
) -> tuple[CompileConfig, GraphModule | None]:
    """Return `config` with a format for each matrix, where it has a budget of bits for them.

    Where it has none, a head or a table that the checkpoint holds in the model's format already keeps it, and is not
    rounded to the format of heads. The arguments are those of `round_weights`. The graph as the pass `quantize` gets it
    is returned too, if it was made for that and `config` names no further passes.

    Raises:
        UsageError: the text cannot be used, or the model is a module in memory, which has no tokenizer for one.
    """
    if config.quant == STORED or (config.quant == FOUR_BITS and not config.calibrates):
        return _choose_by_matrix(captured, config, predictors, progress)
    if not is_budget(config.quant):
        return replace(config, tensors=_exact_tables(captured, base_format(config.quant))), None
    if checkpoint is None:
        raise UsageError(f"quant {config.quant} needs a model folder, whose tokenizer reads text; choose a format")
    quantize = quantize_pass(config)
    passes = all_passes(insert_passes(config, predictors), {}, quantize, config.passes)
    # Extra passes may come behind quantization: losses are measured on the graph before it.
    passes = passes[: passes.index(quantize)]
    graph_module = run_passes(captured, passes, progress, verify=config.verify)
    weights = _weights_of(captured, predictors)
    folder = _work(config, scratch) / "bits"
    chosen = checkpoint_formats(
        checkpoint,
        graph_module,
        weights,
        folder,
        options=config.text(config.rounding_tokens),
        bits=parse_bits(config.quant),
        progress=progress,
    )
    found = replace(config, tensors=chosen.formats, bits_per_weight=chosen.bits_per_weight, loss_nats=chosen.loss_nats)
    return found, None


def _choose_by_matrix(
    captured: Captured, config: CompileConfig, predictors: PredictorSet | None, progress: Progress
) -> tuple[CompileConfig, GraphModule | None]:
    """Return `config` with a format for each matrix: those of whole blocks, if an accelerator can compute all of these.

    Tells `progress` which matrices keep the numbers of a quantized checkpoint. The graph is as `choose_formats` says.
    """
    passes = compilation_passes(config, captured.facts, predictors, config.plan)
    passes = passes[: next(place for place, each in enumerate(passes) if isinstance(each, Quantize))]
    graph_module = run_passes(captured, passes, progress, verify=config.verify)
    if may_compute_whole_blocks(config, captured.facts):
        whole, kept = _with_formats(captured, graph_module, replace(config, hot_by_outputs=True))
        if fits_in_whole_blocks(whole, captured):
            if kept:
                progress.say(kept)
            return whole, None if config.passes else graph_module
    found, kept = _with_formats(captured, graph_module, config)
    if kept:
        progress.say(kept)
    return found, None if config.passes else graph_module


def _with_formats(captured: Captured, graph_module: GraphModule, config: CompileConfig) -> tuple[CompileConfig, str]:
    """Return `config` with a format for each matrix of a predicted graph, and a line about them if there is any."""
    if config.quant == STORED:
        kept = choose_stored(
            captured,
            graph_module,
            hot_by_outputs=config.hot_by_outputs,
            on_accelerator=config.back_end is not None,
        )
        return replace(config, tensors=kept.formats, rounded=kept.rounded), kept.text
    tensors = choose_four_bits(captured, graph_module, hot_by_outputs=config.hot_by_outputs)
    return replace(config, tensors=tensors), ""


def _exact_tables(captured: Captured, quant: str) -> dict[str, str]:
    """Return `quant` by the name of each matrix with a row for each token that the weights have in this format."""
    weights, vocab = captured.weights, captured.facts.vocab
    packed: Callable[[str, str], object] | None = getattr(weights, "packed", None)
    if packed is None or head_format(quant) == quant:
        return {}
    tables = [name for name in weights.names() if len(weights.shape(name)) == 2 and weights.shape(name)[0] == vocab]
    return {name: quant for name in tables if packed(name, quant) is not None}


def round_weights(
    checkpoint: Path | None,
    captured: Captured,
    config: CompileConfig,
    predictors: PredictorSet | None,
    scratch: Path,
    progress: Progress,
) -> WeightSource:
    """Return the weights of the model, with matrices rounded for the calibration text where `config` asks for that.

    Args:
        checkpoint: the model's folder or file, None for a module in memory, which has no tokenizer for a text.
        captured: the model.
        config: what the model is compiled for.
        predictors: its lossy predictors, which decide what down gets; None where the predictor is lossless.
        scratch: a folder for what is not kept.
        progress: is told of each step.

    Raises:
        UsageError: the text cannot be used.
        UnsupportedModelError: the model's values are not finite numbers.
    """
    base = captured.weights
    if not config.calibrates or checkpoint is None:
        return base

    passes = all_passes(insert_passes(config, predictors), {}, quantize_pass(config), config.passes)
    graph_module = run_passes(captured, passes, progress, verify=config.verify)
    if has_experts(captured.graph_module):
        progress.say("matrices of experts are rounded to the nearest; all others are rounded for the text")
    weights = _weights_of(captured, predictors)
    folder = _work(config, scratch) / "rounding"
    text = config.text(config.rounding_tokens)
    return round_checkpoint(checkpoint, graph_module, weights, folder, options=text, progress=progress).onto(base)


def _weights_of(captured: Captured, predictors: PredictorSet | None) -> WeightSource:
    """Return the weights of the model, with those of its lossy predictors if it has any."""
    return captured.weights if predictors is None else predictors.weights(captured.weights)


def _work(config: CompileConfig, scratch: Path) -> Path:
    """Return the folder for what these steps keep: the user's, or one in `scratch` that goes with it."""
    return config.work or scratch / "work"
