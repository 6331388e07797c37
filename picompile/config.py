"""The configuration of a compilation: `CompileOptions` from the user, and `CompileConfig` with every default filled in.

Options are checked as far as possible before anything is read. Once the model is captured, `resolve` makes the config,
which all later steps take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.choices import (
    CHUNK_OPTION,
    CONTEXT,
    DEFAULT_QUANT,
    FORMATS_HELP,
    FOUR_BITS,
    KV_DTYPE,
    LEAST_CALIBRATION_TOKENS,
    PREDICTOR_QUANT,
    SHORT_QUANT,
    STORED,
    TRAINED,
    check_quant,
    default_chunk,
    default_kv_dtype,
    default_predictor,
    finer_cache,
    has_spread_cache,
    is_budget,
    is_calibrated,
    resolve_context,
)
from picompile.errors import UsageError
from picompile.machine.targets import gpu_of
from picompile.options import OVERWRITE, check_options, documented, option
from picompile.placement.machine import (
    HOST_BANDWIDTH,
    HOST_MEMORY,
    VRAM_BUDGET,
    MachineOptions,
    check_machine_options,
)
from picompile.predictors.config import PredictorOptions
from picompile.predictors.profile.options import ProfileOptions
from picompile.quantities import parse_checked_bound, parse_share
from picompile.skipping.options import check_sites
from picompile_codegen.registry import BACK_ENDS
from picompile_runtime.artifact import MOST_SEQUENCES

if TYPE_CHECKING:
    from picompile.frontend.captured import ModelFacts
    from picompile.machine.targets import Target
    from picompile.placement.plan import Plan
    from picompile.skipping.search import FoundLimits

# Elements of one tensor: indices have 32 bits.
_MOST_ELEMENTS = 2**31 - 1


def _read_hot(text: str, flag: str) -> Mapping[int, Sequence[int]]:
    from picompile.placement.hot_file import read_hot

    return read_hot(Path(text))


def _read_plan(text: str, flag: str) -> "Plan":
    from picompile.placement.plan_file import read_plan

    return read_plan(Path(text))


def _check_accelerator(name: str) -> None:
    """Raise `UsageError` unless `name` is that of a back end."""
    if name not in (known := tuple(BACK_ENDS)):
        raise UsageError(f"unknown accelerator {name!r}; known are {', '.join(known)}")


@documented
@dataclass(frozen=True, kw_only=True)
class CompileOptions(PredictorOptions):
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
        common=True,
    )
    quant: str | None = option(
        None,
        f"4bit: a format for each matrix, in no more bytes than llama.cpp's Q4_K_M. stored: the numbers that a "
        f"quantized checkpoint has. {FORMATS_HELP}. With q4, q4m and mxfp4 the output head and embeddings are in q6. "
        "Or a budget, as in 5.2bpw: bits a weight on average, spent where they keep most; auto: as few as keep the "
        f"model's predictions. Default: stored for a quantized checkpoint, else {DEFAULT_QUANT}.",
        metavar="FORMAT",
        check=check_quant,
        common=True,
        short=SHORT_QUANT,
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
    predictor_quant: str | None = PREDICTOR_QUANT.field(None)
    activation_bits: str | None = option(
        None,
        "Bits of activations that matrices of 8 bits or fewer are multiplied with, on a CPU and where no neurons are "
        "skipped. 16 loses nothing to speak of; 8 reads prompts faster. Default: 16 with stored and 4bit, else 8.",
        choices=("8", "16"),
    )
    checkpoint_bound: float | None = option(
        None,
        "Compare the artifact with MODEL in float32 on held-out text, part by part, and refuse it if its perplexity is "
        "further above; report: compare, and allow any. Default: do not compare.",
        metavar="SHARE",
        parse=parse_checked_bound,
        least=0,
        aliases=("--accuracy",),
    )
    skip: float | None = option(
        None,
        "Skip neurons that contribute little, known from gate and output. SHARE bounds the rise in perplexity, as in "
        "1%; any activation, no training. Default: none.",
        metavar="SHARE",
        parse=parse_share,
        above=0,
        most=1,
    )
    skip_at: tuple[str, ...] = option(
        (),
        "Where to skip neurons. gate: before up and down are read. output: before down is read. Repeatable. Default: "
        "gate and output.",
        metavar="PLACE",
        check=check_sites,
    )
    # Read in windows of 512 tokens.
    skip_tokens: int = option(
        16_384, "Tokens that perplexity is measured on for --skip, at most.", metavar="N", least=512
    )
    context: int | None = CONTEXT.field(None)
    chunk: int | None = CHUNK_OPTION.field(None)
    sequences: int = option(
        1,
        "Sequences that the KV cache holds; they can be decoded together.",
        metavar="N",
        least=1,
        most=MOST_SEQUENCES,
        common=True,
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
    accelerator: str | None = option(
        None,
        "Where hot neurons run, and what the plan puts beside them. cuda: the target's GPU. cpu: a second "
        "partition of the CPU, with the same schedule. Or a plug-in's back end. Default: cuda if the target has a GPU; "
        "else hot and cold neurons run one after the other on the host.",
        metavar="NAME",
        check=_check_accelerator,
        aliases=("--hot-device",),
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
        if has_spread_cache(self.kv_dtype) and self.back_end and not BACK_ENDS[self.back_end].spread_caches:
            finer = finer_cache(self.kv_dtype)
            raise UsageError(f"a KV cache in {self.kv_dtype} has no kernels for {self.back_end}; choose {finer}")
        if self.on_gpu and gpu is None:
            raise UsageError(f"accelerator {self.accelerator} needs a target with a GPU, and {self.target} has none")
        if self.activation_bits == "16" and self.back_end is not None:
            raise UsageError(f"activations of 16 bits: {self.back_end} has no kernels for them; leave them out")
        if self.plan is not None:
            self._require_neurons(self.plan)
        self._require_machine(gpu)

    def _require_rounding(self) -> None:
        """Raise `UsageError` for options of rounding that make no sense, or that nothing reads."""
        if self.rounding == "calibrated" and not self._can_calibrate:
            raise UsageError(
                f"rounding calibrated is for formats of fewer than 8 bits, not {self._format}; leave it out"
            )
        if self.rounding_tokens != type(self).rounding_tokens and not self._rounds_by_text:
            raise UsageError("rounding tokens given, but each weight is rounded to the nearest; leave them out")

    def _require_skipping(self) -> None:
        """Raise `UsageError` for options of skipping that make no sense, or that another one forbids."""
        if self.skip is None:
            if self.skip_at or self.skip_tokens != type(self).skip_tokens:
                what = "places to skip at" if self.skip_at else "tokens to measure skipping on"
                raise UsageError(f"{what} given, but not how much skipping may cost; give it, as --skip 1%")
            return
        if self.predictor == "exact":
            raise UsageError("skip leaves out silent neurons too, and predictor exact no others; leave one of them out")

    def _require_use(self) -> None:
        """Raise `UsageError` for a folder or text that no step would read."""
        given = {"predictors": self.predictors, "profile": self.profile, "calibration text": self.calibration}
        for what, wanted in given.items():
            planned = self.makes_plan and what != "predictors"
            rounds = self._rounds_by_text and what == "calibration text"
            read = (self.checkpoint_bound is not None or self.skip is not None) and what != "predictors"
            if wanted and not (planned or rounds or read) and self.predictor not in TRAINED:
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
            check_machine_options(MachineOptions(gpu.name, self.vram_budget, self.host_memory, self.host_bandwidth))

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
    def back_end(self) -> str | None:
        """The back end of hot neurons: `accelerator` if given, else that of the target's GPU, else None."""
        gpu = gpu_of(self.target)
        return self.accelerator or (None if gpu is None else gpu.back_end)

    @property
    def on_gpu(self) -> bool:
        """Whether the accelerator is a GPU."""
        return self.back_end is not None and BACK_ENDS[self.back_end].is_gpu

    @property
    def _format(self) -> str:
        """The weight format, as far as it is known without the model."""
        return self.quant or DEFAULT_QUANT

    @property
    def _can_calibrate(self) -> bool:
        return is_calibrated(self._format)

    @property
    def calibrates(self) -> bool:
        """Whether weights are rounded for calibration text, if the model is a folder or file."""
        if self.rounding is not None:
            return self.rounding == "calibrated"
        return self._can_calibrate and (self.work is not None or bool(self.calibration))

    @property
    def _rounds_by_text(self) -> bool:
        """Whether calibration text decides the formats of weights, or how they are rounded."""
        return self.calibrates or is_budget(self._format)

    @property
    def machine(self) -> MachineOptions | None:
        """The machine to make a plan for, None where no plan is made."""
        gpu = gpu_of(self.target)
        if gpu is None or not self.makes_plan:
            return None
        return MachineOptions(gpu.name, self.vram_budget, self.host_memory, self.host_bandwidth)


@dataclass(frozen=True, kw_only=True)
class CompileConfig(CompileOptions):
    """The configuration of one compilation: its options, with all that depends on the model filled in.

    `resolve` makes it. None means that there is no such thing, a plan for example; it never means a default.

    Attributes:
        insert_kind: what `InsertPredictors` is told: `predictor`, or `auto` where the user left it open, which decides
            block by block.
        tensors: formats of matrices by the names of their parameters, once they are chosen.
        hot_by_outputs: whether an accelerator computes every neuron of all blocks, so that down is packed by outputs.
        limits: limits of neurons, once they are found, where `skip` asks for them.
        activation_bytes: bytes of an activation that matrices in panels are multiplied with.
        rounded: how many matrices of a quantized checkpoint do not keep their numbers, by the format they get.
        bits_per_weight, loss_nats: what formats that were chosen for a budget take, and are estimated to lose.
    """

    quant: str
    activation_bytes: int
    context: int
    chunk: int
    kv_dtype: str
    predictor: str
    predictor_quant: str
    rounding: str
    insert_kind: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    hot_by_outputs: bool = False
    limits: "FoundLimits | None" = None
    rounded: Mapping[str, int] = field(default_factory=dict)
    bits_per_weight: float | None = None
    loss_nats: float | None = None

    def __post_init__(self) -> None:
        """Check nothing: the options were checked."""

    def text(self, tokens: int) -> ProfileOptions:
        """Return the text that the steps of the compilation read, at most `tokens` of it, as profiling is told."""
        return ProfileOptions(calibration=self.calibration, tokens=tokens, activation=self.activation)

    def rounding_json(self) -> dict[str, Any]:
        """Return how weights are rounded, as report.json says it."""
        found: dict[str, Any] = {"method": self.rounding}
        if self.calibrates:
            found["tokens"] = self.rounding_tokens
        if self.rounding == STORED:
            found["rounded"] = dict(self.rounded)
        if self.bits_per_weight is not None:
            found |= {"bits_per_weight": self.bits_per_weight, "loss_nats": self.loss_nats}
        return found


def _chunk(options: CompileOptions, context: int) -> int:
    """Return how many tokens of a prompt are read together: as given, as planned, or by default."""
    if options.chunk is not None:
        return options.chunk
    if options.plan is not None and options.on_gpu:
        return options.plan.chunk
    return default_chunk(context, on_gpu=options.on_gpu)


def predictor_quant(options: CompileOptions) -> str:
    """Return the format of predictors' own matrices: as given, as planned, or `auto`."""
    planned = None if options.plan is None else options.plan.predictor_quant
    return options.predictor_quant or planned or "auto"


def resolve(options: CompileOptions, facts: "ModelFacts", quant: str | None = None) -> CompileConfig:
    """Return the config of a compilation of the model that `facts` are about.

    `quant` is the weight format where the user left it open, `DEFAULT_QUANT` unless given.

    Raises:
        UsageError: the context exceeds the model's positions, the cache has more elements than a 32-bit index can
            address, or there is no cache of that type for the model's heads.
    """
    _check_heads(options, facts)
    context = cache_context(options, facts)
    # Limits leave out silent neurons as `exact` does, and others.
    kind = options.predictor if options.skip is None else options.predictor or "none"
    options = replace(options, quant=options.quant or quant or DEFAULT_QUANT)
    wide = options.activation_bits == "16" or (options.activation_bits is None and options.quant in (STORED, FOUR_BITS))
    found = {
        "activation_bytes": 2 if wide else 1,
        "context": context,
        "chunk": _chunk(options, context),
        "kv_dtype": options.kv_dtype or default_kv_dtype(facts.activation),
        "predictor": kind or default_predictor(facts.activation),
        "predictor_quant": predictor_quant(options),
        "rounding": STORED if options.quant == STORED else "calibrated" if options.calibrates else "nearest",
    }
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    return CompileConfig(insert_kind=kind or "auto", **(given | found))


def _check_heads(options: CompileOptions, facts: "ModelFacts") -> None:
    """Raise `UsageError` for a model whose heads do not fit the type of the KV cache."""
    from picompile_passes.formats import GROUP

    if has_spread_cache(options.kv_dtype) and facts.head_dim % GROUP:
        raise UsageError(
            f"a KV cache in {options.kv_dtype} needs heads whose width is a multiple of {GROUP}, and this model's is "
            f"{facts.head_dim}; choose {finer_cache(options.kv_dtype)}"
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
