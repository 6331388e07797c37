"""What a model is compiled for: `CompileOptions` is what a user says, `CompileConfig` what it resolves to.

Options are checked as far as they can be before anything is read. Once the model is captured, `resolve` fills in every
default; all steps after it take the config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.choices import (
    CHUNK,
    DEFAULT_GATE,
    KV_DTYPES,
    LOSSLESS,
    MOST_SEQUENCES,
    PREDICTORS,
    QUANTIZATIONS,
    default_kv_dtype,
    default_predictor,
    resolve_context,
)
from picompile.errors import UsageError
from picompile.machine import gpu_of
from picompile.quantities import require_whole

if TYPE_CHECKING:
    from picompile.frontend.captured import ModelFacts
    from picompile.machine import Target
    from picompile.placement.machine import MachineOptions
    from picompile.placement.plan import Plan
    from picompile.predictors.config import PredictorConfig

HOT_DEVICES = ("cuda", "cpu")
_TRAINED = ("learned", "sign")
# Elements of one tensor: indices have 32 bits.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class CompileOptions:
    """What to compile for. Raises `UsageError`, when it is made, for what no model can be compiled with.

    `target` names rows of the table of targets, several with commas between them; the artifact has code for each.
    `quant` is the weight format: f16, q8 or q4.

    `predictor` None chooses `exact` where the activation leaves neurons silent and `none` elsewhere. `learned`, `sign`
    and what plug-ins add leave out neurons, and undergo an accuracy check: with them, perplexity on held-out text may
    rise by the share `gate` (the accuracy bound) at most, or by any with None; the check reads `gate_tokens` tokens at
    most. `learned` ones come from the folder `predictors`; or they, and the thresholds of `sign`, are trained on the
    profile in the folder `profile`, or on one made from the text files `calibration`. `work` keeps these stages for the
    next time.

    `context` in tokens; None takes the model's own limit, at most 4096. The cache holds `sequences` sequences, each
    with a context of its own; they can be decoded together. `kv_dtype` is f16, f32 or q8; None takes f16, and f32 where
    rounding would move neurons across a jump of the activation (FATReLU). A prompt is read in chunks of `chunk` tokens.

    `hot` maps a layer to the neurons of its hot part; or `plan`, which is of this model's neurons, says which are hot.
    With neither, for a target with a GPU, a plan is made: `vram_budget`, `host_memory` and `host_bandwidth` say for
    which machine, as text, as `picompile plan` takes them. Where not all of the model fits the GPU, that takes the
    profile in the folder `profile`, the one that `work` has, or one made from `calibration`.

    `hot_device` is the accelerator that hot neurons go to: `cuda`, the GPU that a target has, which is the default
    there; `cpu`, a second partition of the CPU, for the same schedule without a GPU; None for a target without a GPU,
    where both parts run one after the other on the host. With a plan the rest of the model goes where the plan has it;
    without one, the accelerator has all but embeddings and cold neurons, and layers that `hot` does not name are hot
    altogether.

    `passes` are extra passes as text, `name{option=value}@stage`, options and stage as needed: each runs as soon as the
    graph is at that stage, or else the one it requires. `dump_ir` receives the graph after every pass. `verify` has the
    graph checked at every stage. `overwrite` lets the artifact replace another.
    """

    target: str = "cpu"
    quant: str = "q4"
    predictor: str | None = None
    context: int | None = None
    sequences: int = 1
    kv_dtype: str | None = None
    chunk: int = CHUNK
    hot: Mapping[int, Sequence[int]] | None = None
    plan: "Plan | None" = None
    vram_budget: str | None = None
    host_memory: str | None = None
    host_bandwidth: str | None = None
    hot_device: str | None = None
    passes: tuple[str, ...] = ()
    dump_ir: Path | None = None
    verify: bool = True
    overwrite: bool = False
    predictors: Path | None = None
    profile: Path | None = None
    calibration: tuple[Path, ...] = ()
    gate: float | None = DEFAULT_GATE
    gate_tokens: int = 4096
    work: Path | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` for what no model can be compiled with."""
        gpu = gpu_of(self.target)
        for value, known, name in (
            (self.quant, QUANTIZATIONS, "quantization"),
            (self.predictor, (None, *_predictors(self.predictor)), "predictor"),
            (self.kv_dtype, (None, *KV_DTYPES), "KV cache type"),
            (self.hot_device, (None, *HOT_DEVICES), "hot device"),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; known are {', '.join(k for k in known if k)}")
        self._require_use()
        require_whole(
            context=self.context, sequences=self.sequences, prefill_chunk=self.chunk, gate_tokens=self.gate_tokens
        )
        if self.gate_tokens < 2:
            raise UsageError(f"the accuracy check must read at least 2 tokens, not {self.gate_tokens}")
        if self.context is not None and self.context < 1:
            raise UsageError(f"the context must be at least 1 token, not {self.context}")
        if not 1 <= self.sequences <= MOST_SEQUENCES:
            raise UsageError(f"the cache can hold from 1 to {MOST_SEQUENCES} sequences, not {self.sequences}")
        if self.chunk < 2:
            raise UsageError(f"the prefill chunk must be at least 2 tokens, not {self.chunk}")
        if self.hot_device == "cuda" and gpu is None:
            raise UsageError(f"hot device cuda needs a target with a GPU, and {self.target} has none")
        if self.plan is not None:
            self._require_neurons(self.plan)
        self._require_machine(gpu)

    def _require_use(self) -> None:
        """Raise `UsageError` for a folder or text that nothing would read."""
        given = {"predictors": self.predictors, "profile": self.profile, "calibration text": self.calibration}
        for what, wanted in given.items():
            planned = self.makes_plan and what != "predictors"
            if wanted and not planned and self.predictor not in _TRAINED:
                raise UsageError(f"{what} given, but predictor {self.predictor or 'auto'} needs none; choose learned")

    def _require_machine(self, gpu: "Target | None") -> None:
        """Raise `UsageError` for sizes of a machine that make no sense, or that no plan is made for."""
        from picompile.placement.machine import check_machine_options

        for name in ("vram_budget", "host_memory", "host_bandwidth"):
            option = f"--{name.replace('_', '-')}"
            if getattr(self, name) is None:
                continue
            if gpu is None:
                raise UsageError(f"{option}: target {self.target} has no GPU; leave it out, or name another --target")
            if not self.makes_plan:
                raise UsageError(f"{option}: no plan is made where it is given what is hot; leave it out")
        if gpu is not None:
            check_machine_options(self._machine(gpu))

    def _require_neurons(self, plan: "Plan") -> None:
        if self.hot is not None:
            raise UsageError("hot neurons and a plan, which has its own; give one of them")
        if any(layer.hot is None for layer in plan.layers):
            raise UsageError(
                f"the plan of {plan.model} is made of {plan.firing}, which says nothing of single neurons; plan with "
                f"the model and its profile"
            )

    @property
    def makes_plan(self) -> bool:
        """Whether the compiler has to decide which neurons are hot."""
        return self.plan is None and self.hot is None and gpu_of(self.target) is not None

    @property
    def accelerator(self) -> str | None:
        """Where hot neurons run: what was asked for, else `cuda` for a target with a GPU, else None."""
        return self.hot_device or ("cuda" if gpu_of(self.target) is not None else None)

    @property
    def is_lossless(self) -> bool:
        """Whether no predictor is wanted that leaves out neurons."""
        return self.predictor is None or self.predictor in LOSSLESS

    def _machine(self, gpu: "Target") -> "MachineOptions":
        """Return the machine with this GPU, as the user describes it."""
        from picompile.placement.machine import MachineOptions

        return MachineOptions(gpu.name, self.vram_budget, self.host_memory, self.host_bandwidth)


def _predictors(wanted: str | None) -> tuple[str, ...]:
    """Return the kinds that can be asked for: ours, and those of plug-ins unless `wanted` is one of ours.

    A kind with weights of its own cannot be asked for: it comes with the folder that holds them.
    """
    if wanted is None or wanted in PREDICTORS:
        return PREDICTORS
    from picompile_passes.predictors import predictor_kind, predictor_kinds

    others = [name for name in predictor_kinds() if name not in PREDICTORS]
    return (*PREDICTORS, *(name for name in others if predictor_kind(name).parameters is None))


@dataclass(frozen=True)
class PlacementConfig:
    """Which neurons are hot, and where they run.

    At most one of the first three is not None: `hot`, neurons by layer, and `plan` were given; `machine` is the machine
    to make a plan for. `accelerator` is `cuda`, `cpu`, or None where everything runs on the host.
    """

    hot: Mapping[int, Sequence[int]] | None
    plan: "Plan | None"
    machine: "MachineOptions | None"
    accelerator: str | None


@dataclass(frozen=True)
class DebugConfig:
    """Extra passes as text, the folder for dumps of the graph (None: no dumps), and whether graphs are verified."""

    passes: tuple[str, ...]
    dump_ir: Path | None
    verify: bool


@dataclass(frozen=True)
class CompileConfig:
    """What one model is compiled for: `CompileOptions` with every default filled in.

    None stands for something that there is not, such as a plan, and never for a default. `targets` are names with
    commas between them; `kv_dtype` is a key of `KV_DTYPES`; `context` and `chunk` are in tokens.
    """

    targets: str
    quant: str
    context: int
    sequences: int
    kv_dtype: str
    chunk: int
    predictor: "PredictorConfig"
    placement: PlacementConfig
    debug: DebugConfig


def resolve(options: CompileOptions, facts: "ModelFacts") -> CompileConfig:
    """Return the config of a compilation of the model that `facts` are about.

    Raises:
        UsageError: the model has no positions for the context, or kernels cannot count the cache's elements.
    """
    from picompile.predictors.config import PredictorConfig

    gpu = gpu_of(options.target)
    return CompileConfig(
        targets=options.target,
        quant=options.quant,
        context=cache_context(options, facts),
        sequences=options.sequences,
        kv_dtype=options.kv_dtype or default_kv_dtype(facts.activation),
        chunk=options.chunk,
        predictor=PredictorConfig(
            kind=options.predictor or default_predictor(facts.activation),
            insert_kind=options.predictor or "auto",
            predictors=options.predictors,
            profile=options.profile,
            calibration=options.calibration,
            work=options.work,
            accuracy_bound=options.gate,
            check_tokens=options.gate_tokens,
        ),
        placement=PlacementConfig(
            hot=options.hot,
            plan=options.plan,
            machine=options._machine(gpu) if options.makes_plan and gpu is not None else None,
            accelerator=options.accelerator,
        ),
        debug=DebugConfig(options.passes, options.dump_ir, options.verify),
    )


def cache_context(options: CompileOptions, facts: "ModelFacts") -> int:
    """Return the context of the cache in tokens: what was asked for, or the model's default. Raises as `resolve`."""
    context = resolve_context(options.context, facts.max_positions)
    elements = options.sequences * context * facts.kv_heads * facts.head_dim
    if elements > _MOST_ELEMENTS:
        raise UsageError(
            f"{cache_text(options.sequences, context)} has {elements:,} elements a layer, and kernels count to "
            f"{_MOST_ELEMENTS:,}; choose fewer sequences or a smaller context"
        )
    return context


def cache_text(sequences: int, context: int) -> str:
    """Return how a message names the key/value cache for so many sequences of `context` tokens."""
    several = "" if sequences == 1 else f"{sequences} sequences of "
    return f"a cache for {several}{context} tokens"
