"""Rounding the weights of one compilation: the text that is read, and the folder that the result is kept in."""

from pathlib import Path

from torch.fx import GraphModule

from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.hf import open_checkpoint
from picompile.output import reserve
from picompile.output.place import require_disk_space
from picompile.predictors.measured_inputs import inputs_sha256
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.windows import checkpoint_windows
from picompile.progress import Progress
from picompile.rounding.budget import ChosenFormats, chosen_formats, fit_budget, fit_loss
from picompile.rounding.losses import measure_losses, read_losses, write_losses
from picompile.rounding.run import round_model
from picompile.rounding.store import RoundedWeights, RoundingDirectory
from picompile_passes.formats import FORMATS
from picompile_passes.graph.materialize import WeightSource


def round_checkpoint(
    checkpoint: Path,
    graph_module: GraphModule,
    weights: WeightSource,
    folder: Path,
    options: ProfileOptions,
    progress: Progress,
) -> RoundedWeights:
    """Round the matrices of a model; return a source that has them.

    Args:
        checkpoint: the model's folder or file.
        graph_module: its quantized graph, with predictors where it has any, and not partitioned.
        weights: the values of its parameters and of its predictors.
        folder: where the result is kept. A complete one of the same inputs is read, and an unfinished one gone on with.
        options: the text to round for, as profiling is told.
        progress: is told of each step.

    Raises:
        UsageError: the text cannot be used, or another process is at work in `folder`.
        UnsupportedModelError: the model's values are not finite numbers.
        DoesNotFitError: the disk is too small.
    """
    text = checkpoint_windows(checkpoint, options)
    mark = fingerprint(checkpoint, options.activation)
    inputs = inputs_sha256(graph_module, weights, mark, text.sha256)
    with reserve(folder.resolve(), overwrite=True, parents=True):
        directory = RoundingDirectory(folder, inputs)
        if not directory.complete:
            _require_disk(checkpoint, folder, options, text.calibration.numel())
        return round_model(
            graph_module, weights, windows=text.calibration.tolist(), directory=directory, progress=progress
        )


def _require_disk(checkpoint: Path, folder: Path, options: ProfileOptions, tokens: int) -> None:
    """Raise `DoesNotFitError` where the disk of `folder` cannot hold the rounded matrices and the states of windows."""
    facts = open_checkpoint(checkpoint, options.activation).facts
    # The live values of all tokens in float32, old and new.
    needed = int(facts.parameters * FORMATS["q6"].bits / 8) + 2 * tokens * facts.hidden * 4
    message = "{output}: needs about {needed} on disk, {free} are free; take fewer --rounding-tokens"
    require_disk_space(folder, needed, message)


# Text that losses are measured on. Every matrix is tried on all of it, each time from its layer on.
_LOSS_WINDOW, _LOSS_WINDOWS = 256, 4
# The loss that `auto` allows, in nats a token: about as large is the relative rise of perplexity.
_AUTO_LOSS = 0.01


def checkpoint_formats(
    checkpoint: Path,
    graph_module: GraphModule,
    weights: WeightSource,
    folder: Path,
    options: ProfileOptions,
    bits: float | None,
    progress: Progress,
) -> ChosenFormats:
    """Choose a format for each matrix of a model.

    Args:
        checkpoint: the model's folder or file.
        graph_module: its predicted graph.
        weights: the values of its parameters and of its predictors.
        folder: keeps the losses that were measured. Those of the same inputs are read.
        options: the text to measure on, as profiling is told.
        bits: the budget, in bits a weight on average; None takes as few as lose 0.01 nats together.
        progress: is told of each step.

    Raises:
        UsageError: the text cannot be used, or another process is at work in `folder`.
    """
    text = checkpoint_windows(checkpoint, options)
    windows = text.calibration[:, :_LOSS_WINDOW].tolist()[:_LOSS_WINDOWS]
    mark = fingerprint(checkpoint, options.activation)
    inputs = inputs_sha256(graph_module, weights, mark, str(windows))
    with reserve(folder.resolve(), overwrite=True, parents=True):
        folder.mkdir(parents=True, exist_ok=True)
        units = read_losses(folder / "losses.json", inputs)
        if units is None:
            units = measure_losses(graph_module, weights, windows, progress)
            write_losses(folder / "losses.json", inputs, units)
    chosen = fit_loss(units, _AUTO_LOSS) if bits is None else fit_budget(units, bits)
    return chosen_formats(units, chosen)
