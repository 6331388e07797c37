"""`picompile plan`: which parts of a model go on the GPU of a machine, and how fast that is expected to be."""

import json
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from picompile.choices import FORMATS_HELP
from picompile.cli.checks import require_model_folder, require_output_file
from picompile.cli.options import (
    ActivationOption,
    DebugOption,
    HostBandwidthOption,
    HostMemoryOption,
    JsonOption,
    KvDtype,
    PredictorQuantOption,
    VramBudgetOption,
)
from picompile.cli.plan_show import show_plan
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.machine import may_have_gpu
from picompile.output import parents_of
from picompile.placement.machine import MachineOptions, check_machine_options, find_machine
from picompile.placement.sources import ModelOptions, find_model
from picompile.quantities import parse_share


def require_plan_output(path: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` if a plan cannot be written to `path`: a file that is no plan is never overwritten."""
    require_output_file(path, "-o", _require_plan, overwrite=overwrite)


def _require_plan(path: Path) -> None:
    from picompile.placement.plan import FORMAT
    from picompile.predictors.description import read_object

    try:
        read_object(path, FORMAT, "a plan")
    except UsageError as error:
        raise UsageError(f"{path}: exists and is no plan, so it is not overwritten; choose another file") from error


def check_model_options(options: ModelOptions) -> None:
    """Raise `UsageError` for options that do not fit together; nothing is read for that."""
    if (options.source is None) == (options.shape is None):
        raise UsageError("give one of MODEL (a Hugging Face folder), PROFILE (of picompile profile) and --shape")
    _check_firing(options)
    if options.predictor_input is not None:
        if options.shape is None:
            raise UsageError("--predictor-input applies to --shape; predictors of a model have inputs of their own")
        if options.predictor not in (None, "learned"):
            raise UsageError(f"--predictor-input: predictor {options.predictor} has none; leave it out")
    if options.predictors is not None and options.predictor not in (None, "learned"):
        raise UsageError(f"--predictors: predictor {options.predictor} needs none; leave it out, or choose learned")
    if options.source is not None and not options.is_profile:
        require_model_folder(options.source)

    from picompile.placement.model_bytes import Packing

    # Made for its checks alone. Values that are not known yet are replaced by valid ones.
    predictor, context = options.predictor or "auto", options.context or 1
    Packing(options.quant, predictor, context, options.batch, options.kv_dtype, predictor_quant=options.predictor_quant)


def _check_firing(options: ModelOptions) -> None:
    if options.shape is not None:
        if options.activation is not None:
            raise UsageError("--activation applies to a model; a shape's config.json names its own")
        for name, value in (("profile", options.profile), ("predictors", options.predictors), ("work", options.work)):
            if value is not None:
                raise UsageError(f"--{name} applies to a model; with --shape, --firing says how neurons fire")
        if options.firing is None:
            raise UsageError("--shape needs --firing: the name of a curve, such as opt, or a share, such as 10%")
    if options.is_profile:
        for name in ("profile", "work", "firing", "activation"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name}: {options.source} is a profile already")
    if options.firing is not None:
        if options.profile is not None:
            raise UsageError("--firing and --profile both say how neurons fire; give one of them")
        if options.work is not None:
            raise UsageError("--work: with --firing nothing is profiled; leave one of them out")
        from picompile.placement.firing import firing_of_curve

        firing_of_curve(options.firing, 1, 1)


class PredictorInput(str, Enum):
    """Inputs of predictors that differ in when a prediction can be made; see `train --input`."""

    BLOCK = "block"
    PREVIOUS = "previous"


class Objective(str, Enum):
    """The objectives of a plan, as in `picompile.placement.planning`."""

    LATENCY = "latency"
    IMPACT = "impact"


def plan_command(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL|PROFILE", help="A Hugging Face folder, or what profile made.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="NAME", help="The machine to plan for; see [bold]picompile targets[/].")
    ] = "local",
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="No model, but a shape: opt-175b, llama-70b, …, or a config.json."),
    ] = None,
    activation: ActivationOption = None,
    firing: Annotated[
        str | None,
        typer.Option(
            metavar="CURVE",
            help="How neurons fire where there is no profile: opt, falcon, bamboo, reglu-7b, reglu-13b, reglu-70b; "
            "the share that fires on a token, 10%; or also the share that makes 80 % of the firings, 10%:30%.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="How MODEL's neurons fire. Default: profile it.")
    ] = None,
    predictors: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="What train made: real sizes, and what they compute.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take and keep profile and predictors here, as compile does.")
    ] = None,
    quant: Annotated[str, typer.Option(metavar="FORMAT", help=f"{FORMATS_HELP}.")] = "q4",
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="learned, exact, sign or none, or a plug-in's. Default: learned where neurons can be silent, else "
            "none.",
            show_default=False,
        ),
    ] = None,
    predictor_quant: PredictorQuantOption = None,
    predictor_input: Annotated[
        PredictorInput | None,
        typer.Option(help="What the predictors of a shape read, as with train. Default: block.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Longest sequence, in tokens. Default: the model's own, 4096 at most."),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Tokens of a prompt that are read together. Default: 128, or 512 with a GPU."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, max=65_536, help="Sequences that are decoded at the same time.")
    ] = 1,
    prompt: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also predict how long a prompt of so many tokens takes, and judge the plan by that and 256 tokens of "
            "an answer.",
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Tokens in the cache where speed counts. Default: half the context."),
    ] = None,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(help="Element type of the key/value cache. Default: f16, and f32 for FATReLU models."),
    ] = None,
    vram_budget: VramBudgetOption = None,
    host_memory: HostMemoryOption = None,
    host_bandwidth: HostBandwidthOption = None,
    margin: Annotated[str, typer.Option(metavar="SHARE", help="How much of either memory to leave free.")] = "5%",
    objective: Annotated[
        Objective,
        typer.Option(help="latency: least time of a token. impact: most firings on the GPU, as PowerInfer published."),
    ] = Objective.LATENCY,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan, for compile --plan.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a plan that is in the way.")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plan what of a model goes where on a machine, before anything is downloaded or bought.

    Attention, cache, predictors and neurons are placed so that a token takes the
    least time within both memories. Speeds are predicted, not measured.

    \b
    Examples:
      picompile plan --shape opt-66b --firing opt --target 4090
      picompile plan build/profile --target 4090 -o build/plan.json
      picompile plan models/tiny-reglu --profile build/profile --target cpu
    """
    machine_options = MachineOptions(target, vram_budget, host_memory, host_bandwidth)
    model_options = ModelOptions(
        source=source,
        shape=shape,
        firing=firing,
        profile=profile,
        predictors=predictors,
        work=work,
        quant=quant,
        predictor=predictor,
        context=context,
        batch=batch,
        kv_dtype=None if kv_dtype is None else kv_dtype.value,
        activation=activation,
        chunk=prefill_chunk,
        on_gpu=may_have_gpu(target),
        predictor_quant=predictor_quant or "auto",
        predictor_input=None if predictor_input is None else predictor_input.value,
    )
    kept_free = parse_margin(margin)
    check_machine_options(machine_options)
    if output is not None:
        require_plan_output(output, overwrite=force)
    check_model_options(model_options)

    from picompile.placement.plan_file import write_plan
    from picompile.placement.planning import PlanOptions, make_plan
    from picompile.placement.prompts import prompt_estimate, unknown_about_prompts

    with progress() as shown:
        with shown.step("machine"):
            machine = find_machine(machine_options)
        if machine.warning is not None:
            shown.say(machine.warning)
        found = find_model(model_options, shown)
        options = PlanOptions(
            target=target,
            machine=machine.machine,
            objective=objective.value,
            margin=kept_free,
            tokens=at,
            fingerprint=found.fingerprint,
        )
        with shown.step("plan"):
            plan = make_plan(found.model, found.firing, options)
            estimate, unknown = None, "" if prompt is None else unknown_about_prompts(plan, machine.target)
            if prompt is not None and not unknown:
                estimate = prompt_estimate(found.model, plan, machine.target, prompt, found.model.chunk)
        if unknown:
            shown.say(f"the time of a prompt cannot be predicted: {unknown}")
    if output is not None:
        with parents_of(output):
            check = partial(require_plan_output, output, overwrite=force)
            write_plan(output, plan, overwrite=force, check=check)
    if json_output:
        of_prompt = {} if prompt is None else {"prompt": None if estimate is None else estimate.to_json()}
        print(json.dumps(plan.to_json() | of_prompt, ensure_ascii=False))
    else:
        show_plan(plan, machine.target.description, machine.host_source, estimate)


def parse_margin(text: str) -> float:
    """Return the share that `--margin` leaves free. Raise `UsageError`."""
    margin = parse_share(text, "--margin")
    if margin >= 1:
        raise UsageError(f"--margin: {text!r} leaves no memory to use; it must be below 100%")
    return margin
