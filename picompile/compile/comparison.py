"""The driver's step that compares an artifact with its checkpoint: on which text, and with which lossy parts."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch.fx import GraphModule

from picompile.accuracy.comparison import CheckpointComparison
from picompile.accuracy.measure import ComparedArtifact, ComparedText, compare_variants
from picompile.accuracy.variants import Variant, round_cache, silence_below
from picompile.artifact.writer import WrittenArtifact
from picompile.choices import AUTO_BITS, FOUR_BITS, STORED, finer_cache, is_budget, is_calibrated
from picompile.compile.accuracy import runnable_here
from picompile.compile.passes import all_passes, insert_passes, quantize_pass, run_passes
from picompile.config import CompileConfig, CompileOptions
from picompile.errors import UsageError
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile.placement.plan import Plan
from picompile.predictors.accuracy import first_windows
from picompile.predictors.predictor_set import HeldOut, PredictorSet, find_held_out
from picompile.predictors.profile.windows import checkpoint_windows
from picompile.progress import Progress
from picompile.skipping.options import SENSITIVITY_TOKENS
from picompile_passes.formats import FORMATS
from picompile_passes.passes.canonicalize import canonical_form


def require_comparable(options: CompileOptions, tokenizer: TokenizerFiles) -> None:
    """Raise `UsageError` where a model without a tokenizer is to be compared with its checkpoint."""
    if options.checkpoint_bound is not None and tokenizer.tokenizer_json is None:
        raise UsageError("--checkpoint-bound reads text, and the model has no tokenizer.json; add the model's own")


def compare_artifact(
    artifact: WrittenArtifact,
    predictors: PredictorSet | None,
    plan: Plan | None,
    config: CompileConfig,
    progress: Progress,
) -> CheckpointComparison | None:
    """Return how far `artifact` is from its checkpoint; None where `config` asks for no comparison.

    The artifact's program, report and manifest may be those of a stand-in then, as after `check_accuracy`.

    Args:
        artifact: the artifact.
        predictors: its lossy predictors; None where the predictor is lossless.
        plan: what it was split by.
        config: what the model is compiled for.
        progress: is told of each step.

    Raises:
        UsageError: the text is too short, or the model is a module in memory.
        UnsupportedModelError: logits are not numbers.
    """
    if config.checkpoint_bound is None:
        return None
    contents = artifact.contents
    if contents.checkpoint is None:
        raise UsageError("only a model folder or a GGUF file can be compared with; leave out checkpoint_bound")
    text = _text(contents.checkpoint, predictors, config)
    reference = (canonical_form(contents.captured.graph_module), contents.captured.weights)
    variants = list(_variants(artifact, predictors, config, progress))
    with runnable_here(artifact, plan, config, progress) as folder:
        compared = ComparedArtifact(
            folder,
            # Prompts are read with every neuron.
            by_decode=predictors is not None,
            title="runtime arithmetic",
            remedy="" if config.quant == "f16" else "--quant f16, which computes with floats",
        )
        bound = config.checkpoint_bound if math.isfinite(config.checkpoint_bound) else None
        return compare_variants(reference, variants, artifact=compared, text=text, bound=bound, progress=progress)


def _text(checkpoint: Path, predictors: PredictorSet | None, config: CompileConfig) -> ComparedText:
    found = _held_out(checkpoint, predictors, config)
    # The last id of a window is only predicted.
    windows = first_windows(found.windows, config.check_tokens, config.context + 1)
    return ComparedText(windows, found.source)


def _held_out(checkpoint: Path, predictors: PredictorSet | None, config: CompileConfig) -> HeldOut:
    """Return text that weights were not rounded for, limits not searched on, and predictors not trained on.

    A profile reads as much of a text as these do, or more, and holds out what comes behind; predictors that were given
    come with no such text, but what is behind the text of the others is held out.
    """
    learned = list[int]()
    if config.calibrates or is_budget(config.quant):
        learned.append(config.rounding_tokens)
    if config.skip is not None:
        learned.append(config.skip_tokens + SENSITIVITY_TOKENS)
    if learned and (predictors is None or predictors.profile is None):
        text = checkpoint_windows(checkpoint, config.text(max(learned)))
        return HeldOut(text.held_out.tolist(), text.held_out_source)
    return predictors.held_out if predictors is not None else find_held_out(checkpoint, config)


def _variants(
    artifact: WrittenArtifact, predictors: PredictorSet | None, config: CompileConfig, progress: Progress
) -> Iterator[Variant]:
    """Yield the model with one lossy part after another, those that this artifact has.

    The last graph is the artifact's own, and so are its weights.
    """
    contents = artifact.contents
    graph_module, weights = contents.graph_module, contents.weights
    extra = " and extra passes" if config.passes else ""
    limits = contents.skipping
    rules = {} if predictors is None else predictors.firing_rules
    whole = graph_module if predictors is None and limits is None else _whole_graph(artifact, config, progress)
    if config.quant != "f16" or extra:
        title = f"weights in {'chosen formats' if config.quant == AUTO_BITS else config.quant}{extra}"
        yield Variant("weights", title, remedy=_weights_remedy(config), graph_module=whole, weights=weights)
    if silenced := silence_below(whole, rules):
        remedy = "a profile with thresholds of a smaller --accuracy-bound"
        yield Variant(
            "thresholds", title="thresholds", remedy=remedy, graph_module=whole, weights=weights, replaced=silenced
        )
    if limits is not None:
        remedy = "a smaller --skip"
        limited = graph_module if predictors is None else _whole_graph(artifact, config, progress, limits=True)
        yield Variant("skipping", title="neurons below limits", remedy=remedy, graph_module=limited, weights=weights)
    if predictors is not None:
        yield Variant(
            "predictors",
            title="predictors",
            remedy="--predictor exact or none, or larger predictors",
            graph_module=graph_module,
            weights=weights,
        )
    if config.kv_dtype != "f32":
        remedy = f"--kv-dtype {finer_cache(config.kv_dtype)}"
        rounded = round_cache(graph_module, config.kv_dtype)
        yield Variant(
            "kv_cache",
            title=f"KV cache in {config.kv_dtype}",
            remedy=remedy,
            graph_module=graph_module,
            weights=weights,
            replaced=rounded,
        )


def _whole_graph(
    artifact: WrittenArtifact, config: CompileConfig, progress: Progress, *, limits: bool = False
) -> GraphModule:
    """Return the quantized graph of the artifact's model, with every neuron computed and no block split.

    With `limits` those below them are left out.
    """
    config = replace(config, insert_kind="none", limits=config.limits if limits else None)
    captured = artifact.contents.captured
    passes = all_passes(insert_passes(config, None), {}, quantize_pass(config), config.passes)
    return run_passes(captured, passes, progress, verify=config.verify)


def _weights_remedy(config: CompileConfig) -> str:
    if config.quant in (STORED, FOUR_BITS):
        finer = "--quant f16" if config.quant == STORED else "--quant q6 or q8"
    elif is_budget(config.quant):
        bits = config.bits_per_weight
        finer = f"a larger budget than {bits:.2f} bits a weight, or --quant q8"
    else:
        formats = FORMATS[config.quant].finer
        finer = f"--quant {' or '.join(formats)}" if formats else ""
    if is_calibrated(config.quant) and not config.calibrates:
        return f"{finer}, or calibrated rounding (--work DIR)"
    return finer
