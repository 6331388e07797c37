"""`picompile profile`: how a model's neurons fire on text."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from picompile.cli.local_model import local_model
from picompile.cli.options import DebugOption, FolderOutputOption, JsonOption, ModelArgument
from picompile.cli.progress import progress
from picompile.output import parents_of
from picompile.predictors.firing import CONTRIBUTION
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.text import read_calibration
from picompile.processes import uncollected

if TYPE_CHECKING:
    from picompile.predictors.profile.profile import Profile


def profile_command(
    model: ModelArgument,
    output: FolderOutputOption,
    options: ProfileOptions,
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
    path = local_model(model)
    # Together, since standard input is read once.
    texts = read_calibration([*options.calibration, *options.held_out])
    count = len(options.calibration)
    options = replace(options, calibration=texts[:count], held_out=texts[count:])

    with uncollected():
        from picompile.predictors.profile.run import profile_model

    with parents_of(output), progress() as shown:
        profile = profile_model(path, output, options, shown)
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
        if layer.experts:
            choices = f"{layer.experts_for_80_percent:5.1%} of the {layer.experts} experts make 80 % of the choices"
            again = f"{layer.chosen_again:.1%} of the choices are those of the token before"
            print(f"           {choices}, {layer.never_chosen} never chosen; {again}")
