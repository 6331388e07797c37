"""A plan: where each part of a model is on a machine, the memory that it takes, and the speed that is expected."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from picompile.choices import CHUNK
from picompile.errors import SolverError
from picompile.placement.machine import Machine
from picompile.placement.problem import PlacementTask, StagePlace, fixed_bytes, group_bytes
from picompile.placement.times import PartPlaces

FORMAT = "picompile-plan"
SCHEMA = 5

DEVICES = ("accelerator", "host")
LIMITS = ("attention", *DEVICES, "exchange")


def device_name(on_accelerator: bool) -> str:
    """Return the name that plans have for the accelerator or the host."""
    return DEVICES[0] if on_accelerator else DEVICES[1]


@dataclass(frozen=True)
class MemoryRow:
    """The bytes of one kind (`what`) on a `device`, accelerator or host."""

    device: str
    what: str
    bytes: int


@dataclass(frozen=True)
class PlanLayer:
    """The placement of one layer.

    `attention`, `kv_cache` and `predictor` say where these are: accelerator or host. `predictor` is none if the layer
    has no predictor with weights of its own. `computed` is the mean number of neurons computed for a token,
    `hot_computed` of them on the accelerator. The seconds are predicted for a token; `total_s` is the whole layer's.
    `limit` names the part that takes most of it, one of `LIMITS`. `predict_hidden_s` of the prediction are made while
    the layer before waits for the host, and are not in `total_s`. `hot` has the numbers of the hot neurons, None in a
    plan that is made from a curve and not from a model's neurons. Of a mixture, the neurons are of `experts`, of which
    a token chooses `chosen`; both are 0 without experts.
    """

    layer: int
    neurons: int
    hot_neurons: int
    attention: str
    kv_cache: str
    predictor: str
    computed: float
    hot_computed: float
    attention_s: float
    kv_cache_s: float
    predict_s: float
    hot_s: float
    cold_s: float
    exchange_s: float
    total_s: float
    limit: str
    hot: tuple[int, ...] | None = field(default=None, repr=False)
    predict_hidden_s: float = 0.0
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True)
class Plan:
    """The placement of a model on a machine.

    The budgets are the memory that may be taken of both; the share `margin` of each is left free, and `machine`
    has what remains. `tokens` is the number of tokens in the cache for which the speed is predicted. `token_s` is the
    time of one step, which gives `sequences` tokens. `gap` is how much less any placement could cost by the same
    objective, as a share. `baselines` has the tokens/s of dense inference on the same machine, by name: `layers-first`
    and `host`, each if it fits. `host_tokens_per_s` is the speed of the same model and predictors with everything on
    the host; None if that does not fit, or without an accelerator. `fingerprint` is the checkpoint's, None for a shape.
    `chunk` tokens of a prompt are read together. Predictors' own matrices are in `predictor_quant`: a format, or
    `auto`.
    """

    model: str
    fingerprint: str | None
    parameters: int
    quant: str
    predictor: str
    context: int
    sequences: int
    tokens: int
    target: str
    machine: Machine
    accelerator_budget_bytes: int
    host_budget_bytes: int
    margin: float
    objective: str
    firing: str
    layers: tuple[PlanLayer, ...]
    head: str
    head_s: float
    switch_s: float
    memory: tuple[MemoryRow, ...]
    token_s: float
    gap: float
    baselines: Mapping[str, float]
    chunk: int = CHUNK
    predictor_quant: str = "auto"
    host_tokens_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The predicted tokens/s of all sequences together."""
        return self.sequences / self.token_s

    @property
    def dense_tokens_per_s(self) -> float | None:
        """The tokens/s of dense inference on the same machine, the best that fits; None if none does."""
        return max(self.baselines.values(), default=None)

    @property
    def without_gpu_tokens_per_s(self) -> float | None:
        """The tokens/s of the host alone, with predictors or dense; None if neither fits, or without an accelerator."""
        if not self.accelerator_budget_bytes:
            return None
        return max(filter(None, (self.host_tokens_per_s, self.baselines.get("host"))), default=None)

    @property
    def gains(self) -> dict[str, float | None]:
        """The gains in speed over `dense` inference and over the host alone; None for one that does not fit."""
        others = {"dense": self.dense_tokens_per_s, "without_gpu": self.without_gpu_tokens_per_s}
        return {name: self.tokens_per_s / speed if speed else None for name, speed in others.items()}

    def budget_bytes(self, device: str) -> int:
        """Return the bytes that may be taken of a device, its margin included."""
        return self.accelerator_budget_bytes if device == "accelerator" else self.host_budget_bytes

    def capacity_bytes(self, device: str) -> int:
        """Return the bytes that may be filled: the budget less its margin."""
        return self.machine.gpu_bytes if device == "accelerator" else self.machine.host_bytes

    def bytes_by_kind(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each kind, by device."""
        kinds: dict[str, dict[str, int]] = {}
        for row in self.memory:
            of_kind = kinds.setdefault(row.what, {})
            of_kind[row.device] = of_kind.get(row.device, 0) + row.bytes
        return kinds

    def taken_bytes(self, device: str) -> int:
        """Return the bytes of everything on a device."""
        return sum(row.bytes for row in self.memory if row.device == device)

    def hot_neurons(self) -> dict[int, tuple[int, ...]]:
        """Return the hot neurons by layer, as `Partition` takes them, for layers whose neurons are known."""
        return {layer.layer: layer.hot for layer in self.layers if layer.hot is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a plan's file."""
        speeds = {
            "tokens_per_s": self.tokens_per_s,
            "without_gpu_tokens_per_s": self.without_gpu_tokens_per_s,
            "gains": self.gains,
        }
        return {"format": FORMAT, "schema": SCHEMA, **speeds, **asdict(self)}


def check_budgets(plan: Plan) -> None:
    """Raise `SolverError` where a plan takes more of the accelerator's or the host's memory than it may.

    Every plan is checked here, when it is made and when it is read from a file. A budget is what the user gave, or what
    the machine has (`machine.find_machine`); `PlanOptions.capacity` takes off the margin, and `problem.capacities` what
    each side needs besides layers. The rest is what the solver may fill, as constraints of the placement problem. If
    nothing fits, `policies.infeasible_placement_error` is raised before there is a plan.
    """
    for device in DEVICES:
        taken_bytes, limit_bytes = plan.taken_bytes(device), plan.capacity_bytes(device)
        if taken_bytes > limit_bytes:
            raise SolverError(f"the placement takes {taken_bytes} bytes of the {device}'s memory, of {limit_bytes}")


def memory_account(
    task: PlacementTask, wheres: Sequence[PartPlaces], places: Sequence[StagePlace]
) -> tuple[MemoryRow, ...]:
    """Return every byte of a placement by device and kind. A short group counts as full: the artifact takes no more."""
    model, taken = task.model, Counter[tuple[str, str]]()
    for layer, where, place in zip(model.layers, wheres, places, strict=False):
        moved = place.groups * group_bytes(layer)
        left = list(fixed_bytes(layer, where, split=place.groups > 0))
        for on_accelerator, what, size in (
            (where.attention_on_accelerator, "attention", layer.attention_bytes + layer.shared_bytes),
            (where.kv_cache_on_accelerator, "kv cache", layer.kv_cache_bytes),
            (where.predictor_on_accelerator, "predictors", layer.predictor_bytes),
        ):
            taken[device_name(on_accelerator), what] += size
            left[0 if on_accelerator else 1] -= size
        taken["accelerator", "hot neurons"] += left[0] + moved
        taken["host", "cold neurons"] += left[1] - moved
    taken[device_name(wheres[-1].attention_on_accelerator), "output head"] += model.head_bytes
    taken["host", "embedding"] += model.embedding_bytes
    for device in {device for (device, _), size in taken.items() if size}:
        taken[device, "workspace"] += model.workspace_bytes
        taken[device, "tables"] += model.table_bytes
        if device == "accelerator":
            taken[device, "staging"] += model.staging_bytes
    if taken["accelerator", "staging"] and taken["host", "kv cache"]:
        for device in DEVICES:
            taken[device, "staging"] += model.lent_bytes
    return tuple(MemoryRow(device, what, size) for (device, what), size in sorted(taken.items()) if size)
