"""`picompile profile`: how a model's neurons fire on text."""

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.cli.checks import require_model_folder
from picompile.cli.options import (
    ActivationOption,
    CalibrationOption,
    DebugOption,
    FolderOutputOption,
    JsonOption,
    ModelArgument,
)
from picompile.cli.progress import progress
from picompile.output import parents_of
from picompile.predictors.firing import CONTRIBUTION
from picompile.predictors.profile.text import read_calibration
from picompile.quantities import parse_accuracy_bound

if TYPE_CHECKING:
    from picompile.predictors.profile.profile import Profile


class Measure(str, Enum):
    """Measures of a neuron's output, as `picompile.predictors.firing.MEASURES` has them."""

    MAGNITUDE = "magnitude"
    CONTRIBUTION = "contribution"


def profile_command(
    model: ModelArgument,
    output: FolderOutputOption,
    activation: ActivationOption = None,
    calibration: CalibrationOption = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Count firings over N tokens, or over all the text if it has fewer.")
    ] = 65_536,
    samples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Keep the input of each feed-forward block for N of the tokens.")
    ] = 32_768,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens that are read together. Default: 512, or the model's limit if that is lower.",
        ),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text for measuring only. Default: the end of the calibration text, or files left out of it.",
            allow_dash=True,
        ),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="SiLU and GELU models: how far thresholds may raise the perplexity on held-out text; off keeps "
            "thresholds of zero.",
        ),
    ] = "0.1%",
    by: Annotated[
        Measure,
        typer.Option(
            help="SiLU and GELU models: what thresholds are of: the magnitude of a neuron's output, or its "
            "contribution, which is that times the length of the neuron's row of the down matrix.",
        ),
    ] = Measure.MAGNITUDE,
    bf16: Annotated[
        bool,
        typer.Option(
            "--bf16",
            help="Multiply in bfloat16, which takes less time on processors that have it; counts change a little.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed for drawing samples and text.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile that is at this path.")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count how often each neuron fires, and keep samples to train predictors on.

    All text goes through one layer before the next is read, so that memory holds
    one layer and not the model. If interrupted, run the same command again.

    \b
    Examples:
      picompile profile models/tiny-reglu -o build/profile
      picompile profile models/tiny-reglu -o build/profile --calibration README.md
      cat docs/*.md | picompile profile models/tiny-reglu -o build/profile --calibration -
    """
    require_model_folder(model)
    texts = read_calibration([*(calibration or ()), *([] if held_out is None else [held_out])])
    allowed = parse_accuracy_bound(gate)

    from picompile.predictors.profile.options import ProfileOptions
    from picompile.predictors.profile.run import profile_model

    options = ProfileOptions(
        calibration=texts if held_out is None else texts[:-1],
        held_out=() if held_out is None else texts[-1:],
        tokens=tokens,
        samples=samples,
        window=window,
        gate=allowed,
        by=by.value,
        bf16=bf16,
        seed=seed,
        overwrite=force,
        activation=activation,
    )
    with parents_of(output), progress() as shown:
        profile = profile_model(model, output, options, shown)
    if json_output:
        print(json.dumps(json.loads((profile.folder / "profile.json").read_text(encoding="utf-8")), indent=2))
    else:
        _show(profile)


def _show(profile: "Profile") -> None:
    print(f"{profile.folder}: {profile.model_name}, {profile.tokens} tokens in windows of {profile.window}")
    print(f"text      {', '.join(profile.sources)}")
    print(f"held out  {profile.held_out_tokens} tokens: {profile.held_out_source}")
    if profile.thresholds is not None:
        change = profile.thresholds["perplexity"] / profile.thresholds["dense_perplexity"] - 1
        between = profile.thresholds.get("change") or {}  # profiles of earlier versions lack it
        interval = f" ({between['low']:+.3%} to {between['high']:+.3%})" if between.get("low") is not None else ""
        silenced = f"{profile.thresholds['silenced_share']:.1%} of the {profile.by}s"
        print(f"silenced  {silenced}; perplexity {change:+.3%}{interval}")
    measured = "contribution" if profile.by == CONTRIBUTION else "|h|"
    for layer in profile.layers:
        threshold = f", {measured} above {layer.threshold:.3g}" if layer.threshold else ""
        most = f"{layer.neurons_for_80_percent:5.1%} of the neurons make 80 % of the firings"
        never = f"{layer.never_fired} of {layer.neurons} never fired"
        print(f"layer {layer.layer:3d}  {layer.firing_share:6.1%} fire{threshold}, {most}, {never}")
