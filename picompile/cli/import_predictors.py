"""`picompile import-predictors`: predictors that PowerInfer's authors trained, made ours."""

from pathlib import Path
from typing import Annotated

import typer

from picompile.cli.checks import require_output
from picompile.cli.local_model import local_model
from picompile.cli.options import ActivationOption, DebugOption, FolderOutputOption, OverwriteOption
from picompile.cli.progress import progress
from picompile.output import parents_of


def import_predictors_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A *.powerinfer.gguf, a folder with one, or one with model_N.pt.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="The checkpoint that the predictors were trained for.")
    ],
    output: FolderOutputOption,
    activation: ActivationOption = None,
    overwrite: OverwriteOption = False,
    debug: DebugOption = False,
) -> None:
    """Import predictors that others have trained, from PowerInfer's files.

    SOURCE is taken to be hostile: its header is checked first, and another
    process with limits on memory and time reads pickles.

    \b
    Examples:
      picompile import-predictors relu-llama-7b.powerinfer.gguf --model ReluLLaMA-7B -o build/predictors
      picompile import-predictors ReluLLaMA-7B-Predictor --model ReluLLaMA-7B -o build/predictors
    """
    require_output(output, overwrite=overwrite, marker="predictors.json")
    path = local_model(model)

    from picompile.predictors.powerinfer.importer import import_predictors
    from picompile.predictors.powerinfer.sources import find_source

    found = find_source(source)
    with parents_of(output), progress() as shown:
        result = import_predictors(found, path, output, shown, overwrite=overwrite, activation=activation)
    ranks = [layer.rank for layer in result.layers if layer.rank is not None]
    layers = f"{len(ranks)} layer{'s' if len(ranks) > 1 else ''}"
    print(f"{output}: predictors of {layers}, ranks {min(ranks)} to {max(ranks)}, {result.parameters:,} parameters")
    if result.counted_layers:
        print(f"{output / 'layers'}: how often each neuron fired, from the activation statistics")
