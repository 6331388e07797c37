"""The driver's lowering: the program that a config asks for, and a warning where this machine cannot hold it."""

from dataclasses import fields

from torch.fx import GraphModule

from picompile.artifact.code import AcceleratorTarget
from picompile.choices import KV_DTYPES
from picompile.config import CompileConfig, cache_text
from picompile.frontend.captured import ModelFacts
from picompile.machine.host import host_memory
from picompile.placement.plan import Plan
from picompile.progress import Progress
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.placement import Placement
from picompile_codegen.lowering.program import LoweredProgram
from picompile_runtime.devices.memory import in_units


def lower_for(
    graph_module: GraphModule,
    facts: ModelFacts,
    plan: Plan | None,
    config: CompileConfig,
    accelerator: AcceleratorTarget | None,
    progress: Progress,
    *,
    panels: bool = True,
) -> Lowered:
    """Return the program of a quantized graph for the host and `accelerator`, or for the host alone where it is None.

    Args:
        graph_module: the graph.
        facts: of its model.
        plan: says what runs on the accelerator; without one, all that can.
        config: what the model is compiled for.
        accelerator: the accelerator that kernels are made for.
        progress: is told of the step.
        panels: whether all weights that can lie in panels do; not where the host is to read those of a GPU.
    """
    known = {each.name for each in fields(LowerOptions)}
    # Options of a compilation that lowering has as well, under the same names.
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.name in known}
    options = LowerOptions(
        **given
        | {
            "kv_dtype": KV_DTYPES[config.kv_dtype],
            "accelerator": None if accelerator is None else accelerator.kind,
            "placement": _placement(plan, facts.layers),
            "scores_masks": True,
            "panels": panels,
        }
    )
    with progress.step("lower"):
        return lower(graph_module, options)


def _placement(plan: Plan | None, layers: int) -> Placement:
    """Return what of a model runs on the accelerator beside hot neurons: what the plan says, or all that can."""

    if plan is None:
        return Placement.all_of(layers)
    return Placement(
        attention=frozenset(each.layer for each in plan.layers if each.attention == "accelerator"),
        caches=frozenset(each.layer for each in plan.layers if each.kv_cache == "accelerator"),
        predictors=frozenset(each.layer for each in plan.layers if each.predictor == "accelerator"),
        head=plan.head == "accelerator",
    )


def warn_if_large(program: LoweredProgram, progress: Progress) -> None:
    """Tell `progress` if this machine's memory cannot hold the cache; the artifact may be for another machine."""

    total_bytes, _ = host_memory()
    if program.state_bytes > total_bytes:
        needed, there = in_units(program.state_bytes, total_bytes)
        progress.say(
            f"{cache_text(program.sequences, program.context)} takes {needed}, more than this machine's {there}: the "
            "artifact will not load here"
        )
