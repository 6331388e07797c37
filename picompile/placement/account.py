"""The memory account of a placement: every byte, by device and kind."""

from collections import Counter
from collections.abc import Sequence

from picompile.placement.latency import Task, fixed_bytes, group_bytes
from picompile.placement.plan import MemoryRow, device_name
from picompile.placement.program import Place
from picompile.placement.times import Where


def memory_account(task: Task, wheres: Sequence[Where], places: Sequence[Place]) -> tuple[MemoryRow, ...]:
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
