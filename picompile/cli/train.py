"""`picompile train`: predictors for a model, from a profile of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.cli.local_model import local_model
from picompile.cli.options import DebugOption, FolderOutputOption, JsonOption, ModelArgument
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.output import parents_of
from picompile.predictors.train.options import TrainOptions
from picompile.processes import uncollected

if TYPE_CHECKING:
    from picompile.predictors.store import Predictors


def train_command(
    model: ModelArgument,
    profile: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The profile that [bold]picompile profile[/] made of MODEL.")
    ],
    output: FolderOutputOption,
    options: TrainOptions,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train small predictors that tell which neurons will fire.

    Each layer gets the rank that it needs: the choice over all layers reads the
    fewest bytes within the budget. At the end the accuracy check compares the
    perplexity on held-out text. If interrupted, run the same command again.

    \b
    Examples:
      picompile train models/tiny-reglu --profile build/profile -o build/predictors
      picompile train models/tiny-reglu --profile build/profile -o build/small --budget 4% --accuracy-bound off
    """
    if not profile.is_dir():
        raise UsageError(f"{profile}: no such folder; picompile profile makes it")

    path = local_model(model)

    with uncollected():
        from picompile.predictors.profile.profile import load_profile
        from picompile.predictors.train.run import train_predictors

    loaded = load_profile(profile)
    with parents_of(output), progress() as shown:
        predictors = train_predictors(path, profile=loaded, output=output, options=options, progress=shown)
    print((output / "predictors.json").read_text(encoding="utf-8").rstrip()) if json_output else _show(predictors)


def _show(predictors: "Predictors") -> None:
    accuracy, share = predictors.accuracy, predictors.parameters / (predictors.model_parameters or 1)
    print(f"{predictors.path}: {predictors.parameters} parameters, {share:.2%} of the model's")
    if {"perplexity", "dense_perplexity", "relative_change", "tokens"} <= accuracy.keys():
        print(
            f"perplexity {accuracy['perplexity']:.4f}, dense {accuracy['dense_perplexity']:.4f}, "
            f"change {accuracy['relative_change']:+.3%} over {accuracy['tokens']} tokens"
        )
    for layer in predictors.layers:
        rank = f"rank {layer.rank} of {layer.input}" if layer.learned else ""
        found = f"recall {layer.recall or 0:.2%}, by contribution {layer.weighted_recall or 0:.2%}"
        shares = f"{layer.firing_share or 0:.1%} fire, {layer.computed_share or 0:.1%} computed"
        print(f"layer {layer.layer:3d}  {layer.kind:7s} {rank:20s} {found}; {shares}")
