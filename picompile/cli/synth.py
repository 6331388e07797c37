"""`picompile synth`: a checkpoint of a given shape whose neurons fire at a given rate."""

from pathlib import Path
from typing import Annotated

import typer

from picompile.cli.checks import require_output
from picompile.cli.options import DebugOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.options import Option
from picompile.output import parents_of
from picompile.processes import uncollected


def synth_command(
    shape: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="reglu-1.3b, opt-1.3b, llama-7b, tiny-reglu, …, or a config.json."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="MODEL", help="The folder to make.")],
    active: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Share of the neurons that fire for a token, of those that it computes: above 0, at most 1. "
            "Default: 0.1; in mixtures of experts as chance has it.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed gives the same checkpoint.")] = 0,
    dtype: Annotated[str, Option("Element type of the checkpoint.", choices=("f16", "bf16", "f32"))] = "f16",
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Rank of the predictors that come with the checkpoint. Default: by shape."
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make a checkpoint whose neurons fire at a given rate, for benchmarks.

    Its text means nothing. Some neurons fire often and most of them rarely (a
    Beta distribution); low-rank predictors beside the weights know exactly which.
    Mixtures of experts get random weights, and no predictors.

    \b
    Examples:
      picompile synth --shape tiny-reglu -o build/tiny-synthetic
      picompile synth --shape reglu-1.3b --active 0.05 -o build/reglu-1.3b
      picompile synth --shape olmoe-1b-7b -o build/olmoe
    """
    if active is not None and not 0 < active <= 1:
        raise UsageError(f"--active must be above 0 and at most 1, not {active:g}")
    require_output(output, overwrite=False, marker="config.json")

    with uncollected():
        from picompile.frontend.facts import names_experts
        from picompile.synth.shapes import find_config, find_shape
        from picompile.synth.synthesis import synthesize

    name, config = find_config(shape)
    if names_experts(config):
        with uncollected():
            from picompile.synth.random_model import write_random_model

        with parents_of(output), progress() as shown:
            written = write_random_model(name, config, seed, output, dtype, active, progress=shown)
        print(f"{output}: {written.parameters / 1e6:,.1f} M parameters, {written.dtype}, random weights")
        return
    found, active = find_shape(shape), 0.10 if active is None else active
    with parents_of(output), progress() as shown:
        result = synthesize(found, active, seed, output, dtype, progress=shown, rank=rank)
    print(
        f"{output}: {result.parameters / 1e6:,.1f} M parameters, {result.dtype}, "
        f"{result.measured_active:.2%} of the neurons fire"
    )
