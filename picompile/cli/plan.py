"""`picompile plan`: which parts of a model go on the GPU of a machine, and how fast that is expected to be."""

import json
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.choices import DEFAULT_QUANT, STORED, check_quant, planned_format, planned_title
from picompile.cli.checks import require_output_file
from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.plan_show import show_plan
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.frontend.model_file import require_model
from picompile.hub import download_config, parse_model, resolve_model
from picompile.machine.targets import Target
from picompile.options import OVERWRITE
from picompile.output import parents_of
from picompile.placement.goal import PlanGoal
from picompile.placement.machine import MachineOptions, PlanMachine, check_machine_options, find_machine
from picompile.placement.model_options import ModelOptions
from picompile.processes import uncollected
from picompile.progress import Progress
from picompile.spelling import find_name

if TYPE_CHECKING:
    from picompile.placement.model_bytes import ModelBytes
    from picompile.placement.plan import Plan
    from picompile.placement.prompts import PromptEstimate


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
        raise UsageError(
            "give one of MODEL (a Hugging Face folder or a GGUF file), PROFILE (of picompile profile) and --shape"
        )
    _check_firing(options)
    if options.quant is not None:
        check_quant(options.quant)
    if options.quant == STORED and (options.shape is not None or options.is_profile):
        raise UsageError(f"--quant {STORED} applies to a quantized model, whose file has its numbers; choose a format")
    if options.predictor_input is not None:
        if options.shape is None:
            raise UsageError("--predictor-input applies to --shape; predictors of a model have inputs of their own")
        if options.predictor not in (None, "learned"):
            raise UsageError(f"--predictor-input: predictor {options.predictor} has none; leave it out")
    if options.predictors is not None and options.predictor not in (None, "learned"):
        raise UsageError(f"--predictors: predictor {options.predictor} needs none; leave it out, or choose learned")
    if options.source is not None and not options.is_profile:
        require_model(options.source)

    from picompile.placement.model_bytes import Packing

    # Made for its checks alone. Values that are not known yet are replaced by valid ones.
    predictor, context = options.predictor or "auto", options.context or 1
    Packing(
        planned_format(options.quant or DEFAULT_QUANT),
        predictor,
        context,
        options.sequences,
        options.kv_dtype,
        predictor_quant=options.predictor_quant or "auto",
    )


def _check_firing(options: ModelOptions) -> None:
    if options.shape is not None:
        for name, value in (("profile", options.profile), ("predictors", options.predictors), ("work", options.work)):
            if value is not None:
                raise UsageError(f"--{name} applies to a model; with --shape, --firing says how neurons fire")
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


def with_model(options: ModelOptions, text: str) -> ModelOptions:
    """Return the options with the MODEL or PROFILE `text`.

    Of a model on the hub config.json is enough, unless its neurons or its file's formats have a part in the plan: then
    it is downloaded. Raise `UsageError` if there is no such model.
    """
    model = parse_model(text)
    if isinstance(model, Path) or options.shape is not None:
        if options.shape is None and not Path(text).exists():
            _refuse_shape(text)
        return replace(options, source=Path(text))
    for name in ("profile", "predictors"):
        folder = getattr(options, name)
        if folder is not None and not folder.exists():
            raise UsageError(f"--{name}: {folder}: no such folder")
    needs_weights = any((options.profile, options.predictors, options.work)) or options.quant == STORED
    with progress() as shown:
        config = None if needs_weights else download_config(model, shown)
        if config is not None:
            return replace(options, shape=str(config), hub_name=text)
        return replace(options, source=resolve_model(text, shown))


def _refuse_shape(text: str) -> None:
    """Raise `UsageError` if `text`, given as MODEL, is the name of a shape."""
    from picompile.synth.shapes import shape_names

    if name := find_name(text, shape_names()):
        raise UsageError(f"{text}: no such file or folder; it is the name of a shape, so write --shape {name}")


def plan_command(
    machine_options: MachineOptions,
    model_options: ModelOptions,
    goal: PlanGoal,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|PROFILE",
            help="A name on the hub, a Hugging Face folder, a GGUF file, or what profile made.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also predict how long a prompt of so many tokens takes, and judge the plan by that and 256 tokens of "
            "an answer.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan, for compile --plan.")
    ] = None,
    overwrite: Annotated[bool, replace(OVERWRITE, common=False)] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plan what of a model goes where on a machine, before anything is downloaded or bought.

    Attention, cache, predictors and neurons are placed so that a token takes the
    least time within both memories. Speeds are predicted, not measured.

    \b
    Examples:
      picompile plan --shape opt-66b --firing opt --target 4090
      picompile plan meta-llama/Llama-3.3-70B-Instruct --target 4090 --host-memory 64GiB
      picompile plan build/profile --target 4090 -o build/plan.json
      picompile plan models/tiny-reglu --profile build/profile --target cpu
    """
    if source is not None:
        model_options = with_model(model_options, source)
    check_machine_options(machine_options)
    if output is not None:
        require_plan_output(output, overwrite=overwrite)
    with uncollected():
        check_model_options(model_options)
        # The planner, with PyTorch: `_make` finds it loaded.
        import_module("picompile.placement.sources")

    with progress() as shown:
        made = _make(machine_options, model_options, goal, prompt, shown)
    if output is not None:
        _write(made.plan, output, overwrite=overwrite)
    if json_output:
        of_prompt = {} if prompt is None else {"prompt": made.prompt and made.prompt.to_json()}
        print(json.dumps(made.plan.to_json() | of_prompt, ensure_ascii=False))
    else:
        quant = planned_title(model_options.quant, made.plan.quant)
        show_plan(made.plan, made.machine, activation=made.activation, quant=quant, prompt=made.prompt)


@dataclass(frozen=True)
class _Made:
    """A plan, the machine that it is for, the model's activation in the dialect's text, and what a prompt takes.

    `prompt` is None if nobody asked or nobody can say.
    """

    plan: "Plan"
    machine: PlanMachine
    activation: str
    prompt: "PromptEstimate | None"


def _make(
    machine_options: MachineOptions, model_options: ModelOptions, goal: PlanGoal, prompt: int | None, shown: Progress
) -> _Made:
    """Find the machine and the model, and plan one for the other."""
    from picompile.placement.planning import PlanOptions
    from picompile.placement.sources import find_model, plan_found

    with shown.step("machine"):
        machine = find_machine(machine_options)
    if machine.warning is not None:
        shown.say(machine.warning)
    target = machine.target
    found = find_model(replace(model_options, on_gpu=target.vram_bytes > 0), shown)
    options = PlanOptions(
        target.name,
        machine.machine,
        fingerprint=found.fingerprint,
        most_gpu_bytes=machine.usable_bytes,
        **vars(goal),
    )
    with shown.step("plan"):
        model, plan = plan_found(found, options)
    return _Made(
        plan, machine, found.activation, None if prompt is None else _estimate(model, plan, target, prompt, shown)
    )


def _estimate(
    model: "ModelBytes", plan: "Plan", target: Target, tokens: int, shown: Progress
) -> "PromptEstimate | None":
    """Return what a prompt of `tokens` takes, None if that cannot be predicted, which is said."""
    from picompile.placement.prompts import prompt_estimate, unknown_about_prompts

    if unknown := unknown_about_prompts(plan, target):
        shown.say(f"the time of a prompt cannot be predicted: {unknown}")
        return None
    return prompt_estimate(model, plan, target, tokens=tokens, chunk=model.chunk)


def _write(plan: "Plan", output: Path, *, overwrite: bool) -> None:
    from picompile.placement.plan_file import write_plan

    with parents_of(output):
        check = partial(require_plan_output, output, overwrite=overwrite)
        write_plan(output, plan, overwrite=overwrite, check=check)
