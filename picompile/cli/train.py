"""`picompile train`: predictors for a model, from a profile of it."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.cli.checks import require_model_folder
from picompile.cli.options import (
    AccuracyBoundOption,
    ActivationOption,
    DebugOption,
    FolderOutputOption,
    JsonOption,
    ModelArgument,
)
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.output import parents_of
from picompile.quantities import parse_accuracy_bound, parse_share

if TYPE_CHECKING:
    from picompile.predictors.store import Predictors


class Input(str, Enum):
    """The input of a learned predictor."""

    AUTO = "auto"
    BLOCK = "block"
    STREAM = "stream"
    PREVIOUS = "previous"


class Device(str, Enum):
    """Where the arithmetic is done."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def train_command(
    model: ModelArgument,
    profile: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The profile that [bold]picompile profile[/] made of MODEL.")
    ],
    output: FolderOutputOption,
    activation: ActivationOption = None,
    gate: AccuracyBoundOption = "0.1%",
    budget: Annotated[
        str, typer.Option(metavar="SHARE", help="Parameters of all predictors, as a share of the model's parameters.")
    ] = "6%",
    recall: Annotated[
        str,
        typer.Option(metavar="SHARE", help="The share of what firing neurons contribute that a predictor must find."),
    ] = "99.7%",
    computed: Annotated[
        float,
        typer.Option(
            metavar="X", min=1, help="Neurons computed for each one that fires, at most, as far as the budget allows."
        ),
    ] = 1.5,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Allow exact predictors for layers where they read fewer bytes.")
    ] = True,
    input_: Annotated[
        Input,
        typer.Option(
            "--input",
            help="What predictors read. block: the block's input. stream: that input before its norm. previous: the "
            "input of the block before.",
            metavar="auto|block|stream|previous",
        ),
    ] = Input.AUTO,
    rank: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Use this rank for all layers. Default: search a rank for each layer."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Layers trained at the same time. Default: one for each core, as memory allows."
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where training runs. auto: CUDA if there is a device.")] = Device.AUTO,
    bf16: Annotated[
        bool,
        typer.Option(
            "--bf16",
            help="Multiply in bfloat16 while predictors are fitted, which takes less time on processors that have it.",
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Train on a Ray cluster; local starts one on this machine. Needs picompile[ray]."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed for the order of the samples.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace predictors that are at this path.")] = False,
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
      picompile train models/tiny-reglu --profile build/profile -o build/small --budget 4% --gate off
    """
    require_model_folder(model)
    bound, share, least = parse_accuracy_bound(gate), parse_share(budget, "--budget"), parse_share(recall, "--recall")
    if not share or not least:
        raise UsageError("--budget and --recall must be above 0")
    if not profile.is_dir():
        raise UsageError(f"{profile}: no such folder; picompile profile makes it")

    from picompile.predictors.profile.profile import load_profile
    from picompile.predictors.train.options import TrainOptions
    from picompile.predictors.train.run import train_predictors

    options = TrainOptions(
        gate=bound,
        budget=share,
        recall=least,
        computed_ratio=computed,
        exact=exact,
        input=input_.value,
        ranks=rank,
        jobs=jobs,
        device=device.value,
        bf16=bf16,
        ray=ray,
        seed=seed,
        overwrite=force,
        activation=activation,
    )
    loaded = load_profile(profile)
    with parents_of(output), progress() as shown:
        predictors = train_predictors(model, loaded, output, options, shown)
    print((output / "predictors.json").read_text(encoding="utf-8").rstrip()) if json_output else _show(predictors)


def _show(predictors: "Predictors") -> None:
    gate, share = predictors.gate, predictors.parameters / (predictors.model_parameters or 1)
    print(f"{predictors.path}: {predictors.parameters} parameters, {share:.2%} of the model's")
    if {"perplexity", "dense_perplexity", "relative_change", "tokens"} <= gate.keys():
        print(
            f"perplexity {gate['perplexity']:.4f}, dense {gate['dense_perplexity']:.4f}, "
            f"change {gate['relative_change']:+.3%} over {gate['tokens']} tokens"
        )
    for layer in predictors.layers:
        rank = f"rank {layer.rank} of {layer.input}" if layer.learned else ""
        found = f"recall {layer.recall or 0:.2%}, by contribution {layer.weighted_recall or 0:.2%}"
        shares = f"{layer.firing_share or 0:.1%} fire, {layer.computed_share or 0:.1%} computed"
        print(f"layer {layer.layer:3d}  {layer.kind:7s} {rank:20s} {found}; {shares}")
