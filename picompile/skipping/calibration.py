"""The limits of one compilation: their calibration text, and the folder that keeps them.

| file | contents |
| --- | --- |
| `skipping.json` | a hash of the inputs, and the rise of the loss at each price that was tried |
| `sensitivities.safetensors` | what `measure_sensitivities` returned |

Sensitivities and perplexity are measured on different windows of the text.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from picompile.errors import UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.output import reserve
from picompile.predictors.measured_inputs import inputs_sha256
from picompile.predictors.profile.files import read_notes, read_tensors, write_json, write_tensors
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.windows import checkpoint_windows
from picompile.progress import Progress
from picompile.skipping.limits import no_limits
from picompile.skipping.options import SENSITIVITY_TOKENS
from picompile.skipping.search import FoundLimits, Rise, SkippingSearch
from picompile.skipping.sensitivities import measure_sensitivities
from picompile_passes.graph.materialize import WeightSource

_NOTES, _SENSITIVITIES = "skipping.json", "sensitivities.safetensors"


def checkpoint_limits(
    checkpoint: Path,
    graph_module: GraphModule,
    weights: WeightSource,
    folder: Path,
    options: ProfileOptions,
    bound: float,
    progress: Progress,
) -> FoundLimits:
    """Find the limits of a model.

    Args:
        checkpoint: the model's folder or file.
        graph_module: its predicted graph, with limits, and not quantized.
        weights: the values of its parameters and of its predictors.
        folder: keeps what was measured. What was measured of the same inputs is read.
        options: the text to measure on, as profiling is told.
        bound: the share by which skipping may raise the perplexity of the text.
        progress: is told of each step.

    Raises:
        UsageError: the text cannot be used, or another process is at work in `folder`.
        UnsupportedModelError: the model's logits are not finite numbers.
    """
    learning, measuring, text_mark = _windows(checkpoint, options)
    # What was measured for one bound serves for every other.
    mark = f"{fingerprint(checkpoint, options.activation)} {text_mark} {options.seed}"
    # The limits are not known yet.
    inputs = inputs_sha256(graph_module, no_limits(graph_module).weights(weights), mark)
    with reserve(folder.resolve(), overwrite=True, parents=True):
        folder.mkdir(parents=True, exist_ok=True)
        notes = read_notes(folder / _NOTES)
        if notes.get("inputs") != inputs:
            notes = {"format": "picompile-skipping", "schema": 1, "inputs": inputs, "tried": {}}
            sensitivities = measure_sensitivities(
                graph_module, weights, windows=learning, seed=options.seed, progress=progress
            )
            write_tensors(folder / _SENSITIVITIES, sensitivities)
            write_json(folder / _NOTES, notes)
        sensitivities, _ = read_tensors(folder / _SENSITIVITIES)
        search = SkippingSearch(
            graph_module=graph_module,
            weights=weights,
            sensitivities=sensitivities,
            windows=measuring,
            bound=bound,
            progress=progress,
            tried=_tried(notes),
            save=lambda tried: write_json(
                folder / _NOTES, notes | {"tried": {str(k): asdict(v) for k, v in tried.items()}}
            ),
        )
        return search.run()


def _tried(notes: Mapping[str, Any]) -> dict[int, Rise]:
    """Return the prices that were tried, by step; none if another program wrote the file."""
    try:
        return {int(step): Rise(float(rise["nats"]), float(rise["error"])) for step, rise in notes["tried"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _windows(checkpoint: Path, options: ProfileOptions) -> tuple[list[list[int]], list[list[int]], str]:
    """Return the windows for sensitivities, those for perplexity, and a hash of the text."""
    text = checkpoint_windows(checkpoint, options)
    count, size = text.calibration.shape
    if count < 2 or size < 2:
        raise UsageError(f"limits need a text of at least 2 windows of {size} tokens; give a longer one")
    # The windows are drawn at random, since those of one file follow each other.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed))
    rows: list[list[int]] = text.calibration[order].tolist()
    learning = max(1, min(count - 1, SENSITIVITY_TOKENS // size))
    return rows[:learning], rows[learning:], text.sha256
