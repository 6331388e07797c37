"""The configuration of a compilation: `CompileOptions` from the user, and `CompileConfig` with every default filled in.

Options are checked as far as possible before anything is read. Once the model is captured, `resolve` makes the config,
which all later steps take.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.choices import (
    BF16_CHOICES,
    DEFAULT_ACCURACY_BOUND,
    DEFAULT_ROUNDING_TOKENS,
    DEFAULT_SKIP_TOKENS,
    DRAFT_TOKENS,
    KV_DTYPES,
    LEAST_CALIBRATION_TOKENS,
    LEAST_SKIP_TOKENS,
    LOSSLESS,
    MOST_SEQUENCES,
    PREDICTORS,
    ROUNDINGS,
    check_predictor_quant,
    check_quant,
    default_chunk,
    default_kv_dtype,
    default_predictor,
    is_budget,
    is_calibrated,
    resolve_context,
)
from picompile.errors import UsageError
from picompile.frontend.activation import check_activation
from picompile.machine import gpu_of
from picompile.quantities import require_whole
from picompile.skipping.options import SITES, SkippingOptions, check_bound, check_sites

if TYPE_CHECKING:
    from picompile.frontend.captured import ModelFacts
    from picompile.machine import Target
    from picompile.placement.machine import MachineOptions
    from picompile.placement.plan import Plan
    from picompile.predictors.config import PredictorConfig
    from picompile.predictors.profile.text import CalibrationText
    from picompile.skipping.search import FoundLimits

HOT_DEVICES = ("cuda", "cpu")
_TRAINED = ("learned", "sign")
# Elements of one tensor: indices have 32 bits.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class CompileOptions:
    """The options of a compilation. The constructor raises `UsageError` for values that fit no model.

    Attributes:
        target: rows of the table of targets, separated by commas; the artifact has code for each.
        quant: weight format: f16, q8, q6, q4m or q4. With the last two the output head and embeddings are in q6. Or a
            budget such as `5.2bpw`, bits a weight on average: each matrix gets the format, from q4 to q8, with which
            they all lose least together. `auto` is the smallest budget with which predictions stay as they are, but for
            a divergence of 0.01 nats.
        predictor: None is `exact` if the activation leaves neurons silent, otherwise `none`. `learned`, `sign` and the
            kinds of plug-ins leave out neurons, so the accuracy check applies to them.
        predictor_quant: weight format of predictors' own matrices; `auto` is `quant`, but q6 where that has 4 bits.
            None is what the plan has, or `auto`.
        context: longest sequence, in tokens; None is the model's own limit, at most 4096.
        sequences: how many sequences the cache holds, each with a context of its own; they can be decoded together.
        draft_tokens: how many tokens of a draft a step can check beside the next one, from 0 on; a program with a GPU
            checks none.
        kv_dtype: f16, f32, q8 or q4, which has no kernels for a GPU; None is f16, but f32 if rounding would move
            neurons across a jump of the activation (FATReLU).
        chunk: tokens of a prompt that are read together; None is what the plan has, or `choices.default_chunk`.
        bf16: whether prompts are computed in bfloat16, where the weights are f16 and the target has it: `on`, `off`, or
            `auto`, where that keeps to the accuracy bound `gate`.
        hot: the hot neurons by layer.
        plan: a plan of this model's neurons, which says which are hot. It is given instead of `hot`. With neither, a
            plan is made if the target has a GPU.
        vram_budget, host_memory, host_bandwidth: the machine to make a plan for, as text, as in `picompile plan`.
        hot_device: the accelerator that computes hot neurons: `cuda` is the target's GPU and the default if it has one;
            `cpu` is a second partition of the CPU, with the same schedule but no GPU. None, for a target without a GPU,
            has hot and cold neurons computed one after the other on the host. Without a plan, the accelerator has
            everything but embeddings and cold neurons, and layers that `hot` does not name are hot altogether.
        passes: extra passes as text, `name{option=value}@stage`; options and stage may be left out. Each runs as soon
            as the graph has reached the stage, or else the one that the pass requires.
        dump_ir: a folder that receives the graph after every pass.
        verify: whether the graph is checked at every stage.
        overwrite: whether the artifact may replace another.
        predictors: the folder with learned predictors. Without it they, or the thresholds of `sign`, are trained.
        profile: the folder with the profile to train and plan with; without it one is made. A plan needs a profile only
            if the GPU cannot hold the whole model.
        calibration: the text files, or texts, to make a profile from and to round weights for; `-` is standard input.
        gate: the accuracy bound: the share by which predictors may raise the perplexity; `math.inf` measures it and
            allows any. None measures nothing.
        gate_tokens: how many tokens of held-out text the accuracy check reads at most, and so the comparison with the
            checkpoint.
        accuracy: the share by which the perplexity of the whole artifact may exceed the checkpoint's; `math.inf` for
            any. None does not compare with the checkpoint.
        work: a folder that keeps the profile, the predictors and rounded weights for the next time.
        activation: the activation of the feed-forward blocks, where config.json names another than the model was
            trained with, as `load_model` takes it; None takes what config.json says.
        rounding: `calibrated` rounds weights so that their errors on the calibration text make up for each other;
            `nearest` rounds each by itself. None is `calibrated` where there is calibration text or a work folder, the
            model is a folder or file, and the format has fewer than 8 bits.
        rounding_tokens: how many tokens of the text weights are rounded for, at most.
        skip: leave out neurons that contribute little, as many as raise the perplexity by no more than this share; None
            leaves out none but by predictors. It takes any activation, and no training.
        skip_at: where to skip, of `picompile.skipping.options.SITES`; empty for all.
        skip_tokens: how many tokens of the text perplexity is measured on for that, at most.
    """

    target: str = "cpu"
    quant: str = "q4"
    predictor: str | None = None
    predictor_quant: str | None = None
    context: int | None = None
    sequences: int = 1
    draft_tokens: int = DRAFT_TOKENS
    kv_dtype: str | None = None
    chunk: int | None = None
    bf16: str = "auto"
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
    calibration: "tuple[Path | CalibrationText, ...]" = ()
    gate: float | None = DEFAULT_ACCURACY_BOUND
    gate_tokens: int = 4096
    accuracy: float | None = None
    work: Path | None = None
    activation: str | None = None
    rounding: str | None = None
    rounding_tokens: int = DEFAULT_ROUNDING_TOKENS
    skip: float | None = None
    skip_at: tuple[str, ...] = ()
    skip_tokens: int = DEFAULT_SKIP_TOKENS

    def __post_init__(self) -> None:
        """Raise `UsageError` for options that fit no model."""
        check_activation(self.activation)
        gpu = gpu_of(self.target)
        for value, known, name in (
            (self.rounding, (None, *ROUNDINGS), "rounding"),
            (self.predictor, (None, *_predictors(self.predictor)), "predictor"),
            (self.kv_dtype, (None, *KV_DTYPES), "KV cache type"),
            (self.hot_device, (None, *HOT_DEVICES), "hot device"),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; known are {', '.join(k for k in known if k)}")
        check_quant(self.quant)
        check_predictor_quant(self.predictor_quant or "auto")
        self._require_skipping()
        self._require_use()
        require_whole(
            context=self.context,
            sequences=self.sequences,
            draft_tokens=self.draft_tokens,
            prefill_chunk=self.chunk,
            gate_tokens=self.gate_tokens,
            rounding_tokens=self.rounding_tokens,
            skip_tokens=self.skip_tokens,
        )
        self._require_rounding()
        if self.gate_tokens < 2:
            raise UsageError(f"the accuracy check must read at least 2 tokens, not {self.gate_tokens}")
        if self.accuracy is not None and not self.accuracy >= 0:
            raise UsageError(f"the bound on accuracy must be a share from 0 on, not {self.accuracy}")
        if self.context is not None and self.context < 1:
            raise UsageError(f"the context must be at least 1 token, not {self.context}")
        if not 1 <= self.sequences <= MOST_SEQUENCES:
            raise UsageError(f"the cache can hold from 1 to {MOST_SEQUENCES} sequences, not {self.sequences}")
        if not 0 <= self.draft_tokens < MOST_SEQUENCES:
            raise UsageError(
                f"a step can check from 0 to {MOST_SEQUENCES - 1} tokens of a draft, not {self.draft_tokens}"
            )
        if self.kv_dtype == "q4" and gpu is not None:
            raise UsageError("a KV cache in q4 has no kernels for a GPU; choose q8")
        if self.bf16 not in BF16_CHOICES:
            raise UsageError(f"bf16 is {', '.join(BF16_CHOICES[:-1])} or {BF16_CHOICES[-1]}, not {self.bf16!r}")
        if self.chunk is not None and self.chunk < 2:
            raise UsageError(f"the prefill chunk must be at least 2 tokens, not {self.chunk}")
        if self.hot_device == "cuda" and gpu is None:
            raise UsageError(f"hot device cuda needs a target with a GPU, and {self.target} has none")
        if self.plan is not None:
            self._require_neurons(self.plan)
        self._require_machine(gpu)

    def _require_rounding(self) -> None:
        """Raise `UsageError` for options of rounding that make no sense, or that nothing reads."""
        if self.rounding_tokens < LEAST_CALIBRATION_TOKENS:
            raise UsageError(
                f"weights must be rounded for at least {LEAST_CALIBRATION_TOKENS} tokens, not {self.rounding_tokens}"
            )
        if self.rounding == "calibrated" and not self._can_calibrate:
            raise UsageError(f"rounding calibrated is for formats of fewer than 8 bits, not {self.quant}; leave it out")
        if self.rounding_tokens != DEFAULT_ROUNDING_TOKENS and not self._rounds_by_text:
            raise UsageError("rounding tokens given, but each weight is rounded to the nearest; leave them out")

    def _require_skipping(self) -> None:
        """Raise `UsageError` for options of skipping that make no sense, or that another one forbids."""
        if self.skip_tokens < LEAST_SKIP_TOKENS:
            raise UsageError(f"skipping is measured on at least {LEAST_SKIP_TOKENS} tokens, not {self.skip_tokens}")
        if self.skip is None:
            if self.skip_at or self.skip_tokens != DEFAULT_SKIP_TOKENS:
                what = "places to skip at" if self.skip_at else "tokens to measure skipping on"
                raise UsageError(f"{what} given, but not how much skipping may cost; give it, as --skip 1%")
            return
        check_bound(self.skip)
        check_sites(self.skip_at or SITES)
        if self.predictor == "exact":
            raise UsageError("skip leaves out silent neurons too, and predictor exact no others; leave one of them out")

    def _require_use(self) -> None:
        """Raise `UsageError` for a folder or text that no step would read."""
        given = {"predictors": self.predictors, "profile": self.profile, "calibration text": self.calibration}
        for what, wanted in given.items():
            planned = self.makes_plan and what != "predictors"
            rounds = self._rounds_by_text and what == "calibration text"
            read = (self.accuracy is not None or self.skip is not None) and what != "predictors"
            if wanted and not (planned or rounds or read) and self.predictor not in _TRAINED:
                nearest = what == "calibration text" and self.rounding == "nearest"
                also = ", and rounding to the nearest reads none" if nearest else ""
                raise UsageError(
                    f"{what} given, but predictor {self.predictor or 'auto'} needs none{also}; choose learned"
                )

    def _require_machine(self, gpu: "Target | None") -> None:
        """Raise `UsageError` for wrong sizes of a machine, and for any if no plan is made."""
        from picompile.placement.machine import check_machine_options

        for name in ("vram_budget", "host_memory", "host_bandwidth"):
            option = f"--{name.replace('_', '-')}"
            if getattr(self, name) is None:
                continue
            if gpu is None:
                raise UsageError(f"{option}: target {self.target} has no GPU; leave it out, or name another --target")
            if not self.makes_plan:
                raise UsageError(
                    f"{option}: --hot or --plan says which neurons are hot, so no plan is made; leave it out"
                )
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
        """Where hot neurons run: `hot_device` if given, else `cuda` for a target with a GPU, else None."""
        return self.hot_device or ("cuda" if gpu_of(self.target) is not None else None)

    @property
    def _can_calibrate(self) -> bool:
        return is_calibrated(self.quant)

    @property
    def calibrates(self) -> bool:
        """Whether weights are rounded for calibration text, if the model is a folder or file."""
        if self.rounding is not None:
            return self.rounding == "calibrated"
        return self._can_calibrate and (self.work is not None or bool(self.calibration))

    @property
    def _rounds_by_text(self) -> bool:
        """Whether calibration text decides the formats of weights, or how they are rounded."""
        return self.calibrates or is_budget(self.quant)

    @property
    def is_lossless(self) -> bool:
        """Whether the predictor is lossless: it leaves out no neuron that fires."""
        return self.predictor is None or self.predictor in LOSSLESS

    def _machine(self, gpu: "Target") -> "MachineOptions":
        """Return the machine with this GPU, as the user describes it."""
        from picompile.placement.machine import MachineOptions

        return MachineOptions(gpu.name, self.vram_budget, self.host_memory, self.host_bandwidth)


def _predictors(wanted: str | None) -> tuple[str, ...]:
    """Return the known kinds: ours, and those of plug-ins unless `wanted` is one of ours.

    A plug-in's kind with weights of its own is left out: it comes with the folder that holds them.
    """
    if wanted is None or wanted in PREDICTORS:
        return PREDICTORS
    from picompile_passes.predictors import predictor_kind, predictor_kinds

    others = [name for name in predictor_kinds() if name not in PREDICTORS]
    return (*PREDICTORS, *(name for name in others if predictor_kind(name).parameters is None))


@dataclass(frozen=True)
class PlacementConfig:
    """Which neurons are hot, and where they run.

    At most one of the first three is not None: `hot` has the neurons by layer and `plan` is a plan, both given by the
    user; `machine` is the machine to make a plan for. `accelerator` is `cuda`, `cpu`, or None without an accelerator.
    """

    hot: Mapping[int, Sequence[int]] | None
    plan: "Plan | None"
    machine: "MachineOptions | None"
    accelerator: str | None


@dataclass(frozen=True)
class RoundingConfig:
    """The text that weights are rounded for: files, or a default if there are none, and the most tokens of it.

    `compensates` says whether weights are rounded for it, and not each to the nearest value. `work` is the folder that
    keeps the result, None where it is not kept. `activation` is as in `CompileOptions`. `bits_per_weight` and
    `loss_nats` are what formats that were chosen for a budget take and are estimated to lose, None where none were.
    """

    compensates: bool

    calibration: "tuple[Path | CalibrationText, ...]"
    tokens: int
    work: Path | None
    activation: str | None
    bits_per_weight: float | None = None
    loss_nats: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return how weights are rounded, as report.json says it."""
        found: dict[str, Any] = {"method": "calibrated" if self.compensates else "nearest"}
        if self.compensates:
            found["tokens"] = self.tokens
        if self.bits_per_weight is not None:
            found |= {"bits_per_weight": self.bits_per_weight, "loss_nats": self.loss_nats}
        return found


@dataclass(frozen=True)
class ComparisonConfig:
    """The comparison with the checkpoint: the share by which perplexity may rise, None for any; the most tokens."""

    bound: float | None
    tokens: int


@dataclass(frozen=True)
class SkippingConfig:
    """How much of a model is skipped, and at which sites; none means all of `SITES`.

    `work` is the folder that keeps what was measured, None where it is not kept.
    """

    options: SkippingOptions
    sites: tuple[str, ...]
    work: Path | None


@dataclass(frozen=True)
class DebugConfig:
    """Extra passes as text, the folder for dumps of the graph (None: no dumps), and whether graphs are verified."""

    passes: tuple[str, ...]
    dump_ir: Path | None
    verify: bool


@dataclass(frozen=True)
class CompileConfig:
    """The configuration of one compilation: `CompileOptions` with every default filled in.

    None means that there is no such thing, a plan for example; it never means a default. `targets` are names separated
    by commas; `kv_dtype` is a key of `KV_DTYPES`; `context` and `chunk` are in tokens. `tensors` has the formats of
    matrices by the names of their parameters, once they are chosen, where `quant` is a budget of bits, and `limits`
    has those of neurons, once they are found, where `skipping` asks for them.
    """

    targets: str
    quant: str
    predictor_quant: str
    context: int
    sequences: int
    draft_tokens: int
    kv_dtype: str
    chunk: int
    bf16: str
    predictor: "PredictorConfig"
    rounding: RoundingConfig
    comparison: ComparisonConfig | None
    skipping: SkippingConfig | None
    placement: PlacementConfig
    debug: DebugConfig
    tensors: Mapping[str, str] = field(default_factory=dict)
    limits: "FoundLimits | None" = None


def _chunk(options: CompileOptions, context: int) -> int:
    """Return how many tokens of a prompt are read together: as given, as planned, or by default."""
    if options.chunk is not None:
        return options.chunk
    if options.plan is not None and options.accelerator == "cuda":
        return options.plan.chunk
    return default_chunk(context, on_gpu=options.accelerator == "cuda")


def predictor_quant(options: CompileOptions) -> str:
    """Return the format of predictors' own matrices: as given, as planned, or `auto`."""
    planned = None if options.plan is None else options.plan.predictor_quant
    return options.predictor_quant or planned or "auto"


def resolve(options: CompileOptions, facts: "ModelFacts") -> CompileConfig:
    """Return the config of a compilation of the model that `facts` are about.

    Raises:
        UsageError: the context exceeds the model's positions, the cache has more elements than a 32-bit index can
            address, or there is no cache of that type for the model's heads.
    """
    from picompile.predictors.config import PredictorConfig

    _check_heads(options, facts)
    gpu, skips = gpu_of(options.target), options.skip is not None
    context = cache_context(options, facts)
    return CompileConfig(
        targets=options.target,
        quant=options.quant,
        predictor_quant=predictor_quant(options),
        context=context,
        sequences=options.sequences,
        draft_tokens=options.draft_tokens,
        kv_dtype=options.kv_dtype or default_kv_dtype(facts.activation),
        chunk=_chunk(options, context),
        bf16=options.bf16,
        predictor=PredictorConfig(
            kind=options.predictor or ("none" if skips else default_predictor(facts.activation)),
            # Limits leave out silent neurons as `exact` does, and others.
            insert_kind=options.predictor or ("none" if skips else "auto"),
            predictors=options.predictors,
            profile=options.profile,
            calibration=options.calibration,
            work=options.work,
            accuracy_bound=None if options.gate is None or math.isinf(options.gate) else options.gate,
            is_checked=options.gate is not None,
            check_tokens=options.gate_tokens,
            activation=options.activation,
        ),
        rounding=RoundingConfig(
            options.calibrates, options.calibration, options.rounding_tokens, options.work, options.activation
        ),
        comparison=None
        if options.accuracy is None
        else ComparisonConfig(options.accuracy if math.isfinite(options.accuracy) else None, options.gate_tokens),
        skipping=None
        if options.skip is None
        else SkippingConfig(
            SkippingOptions(
                options.skip, options.calibration, tokens=options.skip_tokens, activation=options.activation
            ),
            options.skip_at,
            options.work,
        ),
        placement=PlacementConfig(
            hot=options.hot,
            plan=options.plan,
            machine=options._machine(gpu) if options.makes_plan and gpu is not None else None,
            accelerator=options.accelerator,
        ),
        debug=DebugConfig(options.passes, options.dump_ir, options.verify),
    )


def _check_heads(options: CompileOptions, facts: "ModelFacts") -> None:
    """Raise `UsageError` for a model whose heads do not fit the type of the KV cache."""
    from picompile_passes.formats import GROUP

    if options.kv_dtype == "q4" and facts.head_dim % GROUP:
        raise UsageError(
            f"a KV cache in q4 needs heads whose width is a multiple of {GROUP}, and this model's is {facts.head_dim}; "
            "choose q8"
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
    """Return the name that messages have for a KV cache of so many sequences of `context` tokens."""
    several = "" if sequences == 1 else f"{sequences} sequences of "
    return f"a cache for {several}{context} tokens"
