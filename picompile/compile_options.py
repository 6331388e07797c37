"""What a model is compiled for, checked as far as can be before anything is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.errors import UsageError
from picompile.machine import gpu_of
from picompile.quantities import require_whole

if TYPE_CHECKING:
    from picompile.machine import Target
    from picompile.placement.machine import MachineOptions
    from picompile.placement.plan import Plan

HOT_DEVICES = ("cuda", "cpu")
QUANTIZATIONS = ("f16", "q8", "q4")
PREDICTORS = ("exact", "learned", "sign", "none")
LOSSLESS = (None, "exact", "none")
_TRAINED = ("learned", "sign")
KV_DTYPES = {"f16": "float16", "f32": "float32", "q8": "q8"}
DEFAULT_CONTEXT = 4096
MOST_SEQUENCES = 256
DEFAULT_GATE = 0.001
CHUNK = 64


@dataclass(frozen=True)
class CompileOptions:
    """What to compile for.

    `target` names rows of the table of targets, several with commas between them; the artifact has code for each.

    `predictor` None chooses `exact` where the activation leaves neurons silent and `none` elsewhere. `learned`, `sign`
    and what plug-ins add leave out neurons, and pass a gate: with them, perplexity on held-out text may rise by the
    share `gate` at most, None for whatever it comes to. `learned` ones come from the folder `predictors`; or they, and
    the thresholds of `sign`, are trained on the profile in the folder `profile`, or on one made from the text files
    `calibration`. `work` keeps these stages for the next time.

    `context` in tokens; None takes the model's own limit, at most 4096. `sequences` are how many the cache holds, each
    with a context of its own; they can be decoded together. `kv_dtype` is f16, f32 or q8; None takes f16, and
    f32 where rounding would move neurons across a jump of the activation (FATReLU). `hot` maps a layer to the neurons
    of its hot part; or `plan`, which is of this model's neurons, says which are hot. With neither, for a target with a
    GPU, a plan is made: `vram_budget`, `host_memory` and `host_bandwidth` say for which machine, as text, in the way of
    `picompile plan`. Where not all of the model fits the GPU, that takes the profile in the folder `profile`, the one
    that `work` has, or one made from `calibration`.

    `hot_device` is where hot neurons go: `cuda`, a GPU, for targets that have one unless it is said otherwise; `cpu`, a
    second partition of the CPU, for the same schedule without a GPU; None, where both parts run one after the other on
    the CPU. With a plan the rest of the model goes where the plan has it; without, the device has all but embeddings
    and cold neurons, and layers that `hot` does not name are hot altogether.

    `passes` are extra passes as text, `name{option=value}@stage`, options and stage as needed: each runs as soon as the
    graph is at that stage, or else the one it requires. `dump_ir` receives the graph after every pass.
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
        """Refuses what no model can be compiled with. Raises `UsageError`."""
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
            raise UsageError(f"the gate must read at least 2 tokens, not {self.gate_tokens}")
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
        """Raises `UsageError` for a folder or text that nothing would read."""
        given = {"predictors": self.predictors, "profile": self.profile, "calibration text": self.calibration}
        for what, wanted in given.items():
            planned = self.makes_plan and what != "predictors"
            if wanted and not planned and self.predictor not in _TRAINED:
                raise UsageError(f"{what} given, but predictor {self.predictor or 'auto'} needs none; choose learned")

    def _require_machine(self, gpu: "Target | None") -> None:
        """Raises `UsageError` for sizes of a machine that make no sense, or that no plan is made for."""
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
            check_machine_options(self.machine(gpu))

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
        """Whether it is left to the compiler which neurons are hot."""
        return self.plan is None and self.hot is None and gpu_of(self.target) is not None

    def machine(self, gpu: "Target") -> "MachineOptions":
        """The machine with this GPU that a plan is made for."""
        from picompile.placement.machine import MachineOptions

        return MachineOptions(gpu.name, self.vram_budget, self.host_memory, self.host_bandwidth)

    @property
    def device(self) -> str | None:
        """The hot device: what was asked for, or the target's GPU."""
        return self.hot_device or ("cuda" if gpu_of(self.target) is not None else None)


def _predictors(wanted: str | None) -> tuple[str, ...]:
    """The kinds that can be asked for: ours, and those of plug-ins, which are only looked for where it is none of ours.

    A kind with weights of its own comes with the folder that holds them.
    """
    if wanted is None or wanted in PREDICTORS:
        return PREDICTORS
    from picompile_passes.predictors import predictor_kind, predictor_kinds

    others = [name for name in predictor_kinds() if name not in PREDICTORS]
    return (*PREDICTORS, *(name for name in others if predictor_kind(name).parameters is None))
