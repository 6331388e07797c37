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
    CHUNK_OPTION,
    CONTEXT,
    FORMATS_HELP,
    KV_DTYPE,
    LEAST_CALIBRATION_TOKENS,
    LOSSLESS,
    MOST_SEQUENCES,
    PREDICTOR_QUANT,
    PREDICTORS,
    check_quant,
    default_chunk,
    default_kv_dtype,
    default_predictor,
    is_budget,
    is_calibrated,
    resolve_context,
)
from picompile.errors import UsageError
from picompile.frontend.activation import ACTIVATION
from picompile.machine import gpu_of
from picompile.options import OVERWRITE, check_options, documented, option
from picompile.placement.machine import (
    HOST_BANDWIDTH,
    HOST_MEMORY,
    VRAM_BUDGET,
    MachineOptions,
    check_machine_options,
)
from picompile.predictors.profile.text import CALIBRATION, CalibrationText
from picompile.quantities import parse_accuracy, parse_checked_bound, parse_share
from picompile.skipping.options import SITES, SkippingOptions, check_sites

if TYPE_CHECKING:
    from picompile.frontend.captured import ModelFacts
    from picompile.machine import Target
    from picompile.placement.plan import Plan
    from picompile.predictors.config import PredictorConfig
    from picompile.skipping.search import FoundLimits

_TRAINED = ("learned", "sign")
# Elements of one tensor: indices have 32 bits.
_MOST_ELEMENTS = 2**31 - 1


def _read_hot(text: str, flag: str) -> Mapping[int, Sequence[int]]:
    from picompile.placement.hot_file import read_hot

    return read_hot(Path(text))


def _read_plan(text: str, flag: str) -> "Plan":
    from picompile.placement.plan_file import read_plan

    return read_plan(Path(text))


def _check_predictor(kind: str) -> None:
    """Raise `UsageError` unless `kind` is one of ours or of a plug-in.

    A plug-in's kind with weights of its own is none of them: it comes with the folder that holds them.
    """
    if kind in PREDICTORS:
        return
    from picompile_passes.predictors import predictor_kind, predictor_kinds

    others = [name for name in predictor_kinds() if name not in PREDICTORS]
    known = (*PREDICTORS, *(name for name in others if predictor_kind(name).parameters is None))
    if kind not in known:
        raise UsageError(f"unknown predictor {kind!r}; known are {', '.join(known)}")


@documented
@dataclass(frozen=True)
class CompileOptions:
    """The options of a compilation. The constructor raises `UsageError` for values that fit no model.

    Here, `off` of an accuracy bound is None and `report` is `math.inf`, shares are numbers, `hot` and `plan` are what
    their files hold, and texts may stand for files of `calibration`. None leaves the choice to the compiler.
    """

    target: str = option(
        "cpu",
        "The machine to compile for, or several separated by commas; see `picompile targets`. native: this machine's "
        "processor and no other.",
        metavar="NAME",
        env="PICOMPILE_TARGET",
        check=gpu_of,
    )
    quant: str = option(
        "q4",
        f"{FORMATS_HELP}. With 4 bits the output head and embeddings are in q6. Or a budget, as in 5.2bpw: bits a "
        "weight on average, spent where they keep most; auto: as few as keep the model's predictions.",
        metavar="FORMAT",
        check=check_quant,
    )
    rounding: str | None = option(
        None,
        "How weights are rounded. calibrated: so that errors on calibration text make up for each other. nearest: each "
        "by itself. Default: calibrated with --calibration or --work, for formats below 8 bits.",
        choices=("calibrated", "nearest"),
    )
    rounding_tokens: int = option(
        32_768, "Tokens that weights are rounded for, at most.", metavar="N", least=LEAST_CALIBRATION_TOKENS
    )
    activation: str | None = ACTIVATION.field(None)
    predictor: str | None = option(
        None,
        "Method used to predict active neurons. exact: from the gating matrix, computed in full; lossless, ReLU family "
        "only. learned: a small trained predictor for each layer. sign: the signs of the weights. none: compute every "
        "neuron. Or a plug-in's kind. Default: exact where neurons can be silent, else none.",
        metavar="KIND",
        check=_check_predictor,
    )
    predictor_quant: str | None = PREDICTOR_QUANT.field(None)
    predictors: Path | None = option(
        None, "Take the predictors that train or import-predictors made. Default: train them.", metavar="FOLDER"
    )
    profile: Path | None = option(
        None, "Train predictors and plan with this profile. Default: make one.", metavar="FOLDER"
    )
    calibration: tuple[Path | CalibrationText, ...] = CALIBRATION.field(())
    accuracy_bound: float | None = option(
        "0.1%",
        "How far predictors may raise the perplexity on held-out text. report: measure, and allow any. off: measure "
        "nothing.",
        metavar="SHARE",
        parse=parse_checked_bound,
        least=0,
        aliases=("--gate",),
    )
    check_tokens: int = option(
        4096,
        "Tokens of held-out text that the accuracy check reads, at most.",
        metavar="N",
        least=2,
        aliases=("--gate-tokens",),
    )
    accuracy: float | None = option(
        None,
        "Compare the artifact with MODEL in float32 on held-out text, part by part, and refuse it if its perplexity is "
        "further above; report sets no bound. Default: do not compare.",
        metavar="SHARE",
        parse=parse_accuracy,
        least=0,
    )
    skip: float | None = option(
        None,
        "Leave out neurons that contribute little, known from gate and output, as many as raise the perplexity by no "
        "more than this; for any activation, without training. Default: none.",
        metavar="SHARE",
        parse=parse_share,
        above=0,
        most=1,
    )
    skip_at: tuple[str, ...] = option(
        (),
        "Where to skip. gate: neurons, before up and down are read. output: neurons, before down is read. Repeatable. "
        "Default: gate and output.",
        metavar="PLACE",
    )
    # Read in windows of 512 tokens.
    skip_tokens: int = option(
        16_384, "Tokens that perplexity is measured on for --skip, at most.", metavar="N", least=512
    )
    work: Path | None = option(
        None,
        "Keep the profile, the predictors and rounded weights here, and continue from what is there.",
        metavar="DIR",
    )
    context: int | None = CONTEXT.field(None)
    chunk: int | None = CHUNK_OPTION.field(None)
    sequences: int = option(
        1,
        "Sequences that the KV cache holds; they can be decoded together.",
        metavar="N",
        least=1,
        most=MOST_SEQUENCES,
    )
    # By default a step has eight tokens: two tiles of four that share what is read of a matrix.
    draft_tokens: int = option(
        7,
        "Tokens of a draft that one step can check (run --draft); 0 for none, as with a GPU.",
        metavar="N",
        least=0,
        most=MOST_SEQUENCES - 1,
    )
    bf16: str = option(
        "auto",
        "Whether prompts are computed in bfloat16 where weights are f16 and the target has it (native, "
        "cpu-avx512-bf16). auto: where that keeps the perplexity within --accuracy-bound, which is measured.",
        choices=("auto", "on", "off"),
    )
    kv_dtype: str | None = KV_DTYPE.field(None)
    passes: tuple[str, ...] = option(
        (),
        "Run one more pass, written name{option=value,…}@stage; options and stage are optional. Repeatable.",
        metavar="NAME",
        flags=("--pass",),
    )
    hot: Mapping[int, Sequence[int]] | None = option(
        None,
        'Split feed-forward blocks by hand: a JSON file of hot neurons by layer, {"0": [5, 17], "1": [3]}.',
        metavar="FILE",
        parse=_read_hot,
    )
    plan: "Plan | None" = option(
        None,
        "Split feed-forward blocks by this plan of picompile plan. Default: with a GPU, make one.",
        metavar="FILE",
        parse=_read_plan,
    )
    vram_budget: str | None = VRAM_BUDGET.field(None)
    host_memory: str | None = HOST_MEMORY.field(None)
    host_bandwidth: str | None = HOST_BANDWIDTH.field(None)
    hot_device: str | None = option(
        None,
        "The accelerator of hot neurons and of what the plan puts beside them. cuda: the target's GPU. cpu: a second "
        "partition of the CPU, with the same schedule. Default: cuda if the target has a GPU; else hot and cold "
        "neurons run one after the other on the host.",
        choices=("cuda", "cpu"),
    )
    dump_ir: Path | None = option(None, "Write the graph after each pass to DIR/NNN_pass-name.txt.", metavar="DIR")
    verify: bool = option(True, "Check the graph at every stage.")
    overwrite: bool = OVERWRITE.field(False)

    def __post_init__(self) -> None:
        """Raise `UsageError` for options that fit no model."""
        check_options(self)
        gpu = gpu_of(self.target)
        self._require_skipping()
        self._require_use()
        self._require_rounding()
        if self.kv_dtype == "q4" and gpu is not None:
            raise UsageError("a KV cache in q4 has no kernels for a GPU; choose q8")
        if self.hot_device == "cuda" and gpu is None:
            raise UsageError(f"hot device cuda needs a target with a GPU, and {self.target} has none")
        if self.plan is not None:
            self._require_neurons(self.plan)
        self._require_machine(gpu)

    def _require_rounding(self) -> None:
        """Raise `UsageError` for options of rounding that make no sense, or that nothing reads."""
        if self.rounding == "calibrated" and not self._can_calibrate:
            raise UsageError(f"rounding calibrated is for formats of fewer than 8 bits, not {self.quant}; leave it out")
        if self.rounding_tokens != type(self).rounding_tokens and not self._rounds_by_text:
            raise UsageError("rounding tokens given, but each weight is rounded to the nearest; leave them out")

    def _require_skipping(self) -> None:
        """Raise `UsageError` for options of skipping that make no sense, or that another one forbids."""
        if self.skip is None:
            if self.skip_at or self.skip_tokens != type(self).skip_tokens:
                what = "places to skip at" if self.skip_at else "tokens to measure skipping on"
                raise UsageError(f"{what} given, but not how much skipping may cost; give it, as --skip 1%")
            return
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
            raise UsageError("hot and plan both say which neurons are hot; give one of them")
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

    def _machine(self, gpu: "Target") -> MachineOptions:
        """Return the machine with this GPU, as the user describes it."""
        return MachineOptions(gpu.name, self.vram_budget, self.host_memory, self.host_bandwidth)


@dataclass(frozen=True)
class PlacementConfig:
    """Which neurons are hot, and where they run.

    At most one of the first three is not None: `hot` has the neurons by layer and `plan` is a plan, both given by the
    user; `machine` is the machine to make a plan for. `accelerator` is `cuda`, `cpu`, or None without an accelerator.
    """

    hot: Mapping[int, Sequence[int]] | None
    plan: "Plan | None"
    machine: MachineOptions | None
    accelerator: str | None


@dataclass(frozen=True)
class RoundingConfig:
    """The text that weights are rounded for: files, or a default if there are none, and the most tokens of it.

    `compensates` says whether weights are rounded for it, and not each to the nearest value. `work` is the folder that
    keeps the result, None where it is not kept. `activation` is as in `CompileOptions`. `bits_per_weight` and
    `loss_nats` are what formats that were chosen for a budget take and are estimated to lose, None where none were.
    """

    compensates: bool

    calibration: tuple[Path | CalibrationText, ...]
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
            accuracy_bound=None
            if options.accuracy_bound is None or math.isinf(options.accuracy_bound)
            else options.accuracy_bound,
            is_checked=options.accuracy_bound is not None,
            check_tokens=options.check_tokens,
            activation=options.activation,
        ),
        rounding=RoundingConfig(
            options.calibrates, options.calibration, options.rounding_tokens, options.work, options.activation
        ),
        comparison=None
        if options.accuracy is None
        else ComparisonConfig(options.accuracy if math.isfinite(options.accuracy) else None, options.check_tokens),
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
