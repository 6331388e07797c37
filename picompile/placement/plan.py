"""A plan: where everything of a model lies on a machine, what it takes there, and how fast it is expected to be."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from picompile.errors import SolverError
from picompile.placement.machine import Machine
from picompile.placement.problem import PlacementTask, StagePlace, fixed_bytes, group_bytes
from picompile.placement.times import PartPlaces

FORMAT = "picompile-plan"
SCHEMA = 1


def device_name(on_gpu: bool) -> str:
    """What a plan calls it."""
    return "gpu" if on_gpu else "host"


@dataclass(frozen=True)
class MemoryRow:
    """`bytes` of one kind (`what`) on a `device`, gpu or host."""

    device: str
    what: str
    bytes: int


@dataclass(frozen=True)
class PlanLayer:
    """One layer. `attention`, `kv_cache` and `predictor` are where they lie, gpu or host; `predictor` is none where
    there is none with weights of its own.

    `computed` neurons are, in the mean, computed for a token, `hot_computed` of them on the GPU. Seconds are expected
    of a token, `total_s` the layer's. `limit` says which takes most of it: attention, gpu, host or exchange. `hot` are
    the numbers of the neurons on the GPU, None where the plan is of a curve and not of a model's neurons.
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


@dataclass(frozen=True)
class Plan:
    """All of it.

    Budgets are what may be taken on each device, of which `margin` is left free; `machine` has what remains. `tokens`
    are in the cache where the speed is expected. `token_s` is one step, of which `batch` tokens come; `gap` is how much
    less any placement could cost by the same objective, as a share. `baselines` are tokens/s of dense inference on the
    same machine by name, `layers-first` and `host`, each where it fits. `fingerprint` is that of the checkpoint, None
    for a shape.
    """

    model: str
    fingerprint: str | None
    parameters: int
    quant: str
    predictor: str
    context: int
    batch: int
    tokens: int
    target: str
    machine: Machine
    gpu_budget_bytes: int
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

    @property
    def tokens_per_s(self) -> float:
        """Expected, of all sequences together."""
        return self.batch / self.token_s

    def budget_bytes(self, device: str) -> int:
        """What may be taken of a device, its margin included."""
        return self.gpu_budget_bytes if device == "gpu" else self.host_budget_bytes

    def capacity_bytes(self, device: str) -> int:
        """The budget less its margin: what may be filled."""
        return self.machine.gpu_bytes if device == "gpu" else self.machine.host_bytes

    def bytes_by_kind(self) -> dict[str, dict[str, int]]:
        """What lies on the devices, by kind and then by device."""
        kinds: dict[str, dict[str, int]] = {}
        for row in self.memory:
            of_kind = kinds.setdefault(row.what, {})
            of_kind[row.device] = of_kind.get(row.device, 0) + row.bytes
        return kinds

    def taken_bytes(self, device: str) -> int:
        """All that lies on a device."""
        return sum(row.bytes for row in self.memory if row.device == device)

    def hot_neurons(self) -> dict[int, tuple[int, ...]]:
        """Layer → its neurons on the GPU, as `Partition` takes them; of a plan that knows the model's neurons."""
        return {layer.layer: layer.hot for layer in self.layers if layer.hot is not None}

    def to_json(self) -> dict[str, Any]:
        """The contents of a plan's file."""
        return {"format": FORMAT, "schema": SCHEMA, "tokens_per_s": self.tokens_per_s, **asdict(self)}


def check_budgets(plan: Plan) -> None:
    """Raise `SolverError` where a plan takes more of the accelerator's or the host's memory than it may.

    Here every plan is held to its budgets. A budget is what the user gave, or what the machine has
    (`machine.find_machine`); `PlanOptions.capacity` takes off the margin, and `latency.capacities` what each side needs
    besides layers: the rest is what the solver may fill, as constraints of the placement problem. Where nothing fits,
    `policies.infeasible_placement_error` says so before there is a plan.
    """
    for device in ("gpu", "host"):
        taken_bytes, limit_bytes = plan.taken_bytes(device), plan.capacity_bytes(device)
        if taken_bytes > limit_bytes:
            raise SolverError(f"the placement takes {taken_bytes} bytes of the {device}'s memory, of {limit_bytes}")


# The memory account of a placement: every byte, by device and kind.


def memory_account(
    task: PlacementTask, wheres: Sequence[PartPlaces], places: Sequence[StagePlace]
) -> tuple[MemoryRow, ...]:
    """What lies where, for each layer and the head at the end. A group counts in full: the artifact takes no more."""
    model, taken = task.model, Counter[tuple[str, str]]()
    for layer, where, place in zip(model.layers, wheres, places, strict=False):
        moved = place.groups * group_bytes(layer)
        left = list(fixed_bytes(layer, where, split=place.groups > 0))
        for on_gpu, what, size in (
            (where.attention_on_gpu, "attention", layer.attention_bytes + layer.shared_bytes),
            (where.kv_cache_on_gpu, "kv cache", layer.kv_cache_bytes),
            (where.predictor_on_gpu, "predictors", layer.predictor_bytes),
        ):
            taken[device_name(on_gpu), what] += size
            left[0 if on_gpu else 1] -= size
        taken["gpu", "hot neurons"] += left[0] + moved
        taken["host", "cold neurons"] += left[1] - moved
    taken[device_name(wheres[-1].attention_on_gpu), "output head"] += model.head_bytes
    taken["host", "embedding"] += model.embedding_bytes
    for device in {device for (device, _), size in taken.items() if size}:
        taken[device, "workspace"] += model.workspace_bytes
        taken[device, "tables"] += model.table_bytes
    return tuple(MemoryRow(device, what, size) for (device, what), size in sorted(taken.items()) if size)
