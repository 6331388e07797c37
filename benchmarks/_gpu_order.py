"""The order of a run of `gpu.py`: what says most is first.

1. The machine, and whether host and GPU see what the other writes: nothing of the hybrid engine works without that.
2. Kernels, small models and the bundled one are checked.
3. Kernels are timed.
4. Models are measured, those of 70 billion parameters first; of each first what the bars need.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from _gpu_units import Unit

Result = dict[str, Any]

PARTS = ("checks", "kernels", "models", "ablation")
# Variant, whether the neurons that fire most are the hot ones, and the parts that ask for it.
_VARIANTS = (
    ("hybrid", True, ("models", "ablation")),
    ("layers_dense", True, ("models", "ablation")),
    ("copied", True, ("models", "ablation")),
    ("hybrid_4090", True, ("models",)),
    ("copied_4090", True, ("models",)),
    ("layers_dense_4090", True, ("models",)),
    ("layers", True, ("ablation",)),
    ("hybrid", False, ("ablation",)),
    ("cpu", True, ("models",)),
    ("gpu", True, ("models",)),
)
_OF_MODEL = ("model", "quant", "budget", "dense_bytes", "hot", "resident_layers", "plan")
# Kernels that exchange values with the host, which they see in memory of the host.
_EXCHANGING = frozenset(
    {"send", "send_mask", "counted_send_mask", "receive", "receive_mask", "borrow_cache", "copy_words"}
)
# A kernel, a small model; memory that is asked for before weights are made; what a variant has beside its weights.
_KERNEL_S, _CHECK_S, _MEMORY_S = 45.0, 60.0, 60.0
# PyTorch may load all its kernels when it starts on the GPU.
_LIMITS_S = 150.0
_MOST_THREADS = (8, 16)
# Beside the file of its weights, a model's host part is in memory once more, and PyTorch.
_TOUCHED_SHARE = 2.1


def default_threads() -> list[int]:
    """Return the numbers of threads that contenders are measured with: those that this machine has cores for."""
    cores = len(os.sched_getaffinity(0))
    return [count for count in _MOST_THREADS if count <= cores] or [cores]


def first_units(options: Namespace, pack: Result) -> list[Unit]:
    """Return what is done by one process, if nothing fails: all but the models."""
    kernels, content = {group["folder"]: group for group in pack["kernels"]}, {"host": pack["host"]}
    smallest = {"folder": pack["kernels"][0]["folder"], **content}
    machine = Unit("machine", "facts", smallest, {})
    if options.case:
        return [machine, *_of_label(pack, options.case)]
    units = [machine, Unit("ping_pong", "facts", smallest, {}, is_gate=True)]
    units.append(Unit("queue", "facts", smallest, {}, needs_exchange=True))
    if "checks" in options.only:
        units += _kernels(kernels["small"])
        units += [_check("check", entry) for entry in pack["checks"]]
        units += [_check("bundled", entry) for entry in pack["bundled"]]
    if "kernels" in options.only and "speed" in kernels:
        units += [Unit("limits", "facts", {"folder": "speed"}, {}, _LIMITS_S), *_kernels(kernels["speed"])]
    units.append(Unit("host", "facts", content, {}))
    return units


def _of_label(pack: Result, label: str) -> list[Unit]:
    units = [unit for group in pack["kernels"] for unit in _kernels(group)]
    found = [unit for unit in units if unit.facts["label"] == label]
    if not found:
        sys.exit(f"the pack has no kernel {label!r}, but {', '.join(unit.facts['label'] for unit in units)}")
    return found


def _kernels(group: Result) -> list[Unit]:
    folder = {"folder": group["folder"]}
    return [
        Unit(
            "kernel", "kernels", case | folder, {"label": case["label"], **folder}, _KERNEL_S,
            needs_exchange=case["op"] in _EXCHANGING,
        )
        for case in group["cases"]
    ]  # fmt: skip


def _check(kind: str, entry: Result) -> Unit:
    label = f"{entry['model']} {entry['quant']} {entry['variant']}"
    return Unit(kind, "checks", entry, {"label": label}, _CHECK_S, needs_exchange=True)


def model_units(options: Namespace, pack: Result) -> list[list[Unit]]:
    """Return what is measured of models: each list by a process of its own."""
    names = dict.fromkeys(f"{entry['model']}:{entry['quant']}" for entry in pack["models"])
    groups: list[list[Unit]] = []
    for name in options.models or names:
        if name not in names:
            sys.exit(f"{options.pack}: has no model {name}, but {', '.join(names)}")
        entries = {row["variant"]: row for row in pack["models"] if f"{row['model']}:{row['quant']}" == name}
        groups += [[unit] for unit in _variants(options, entries)]
    return groups


def _variants(options: Namespace, entries: Mapping[str, Result]) -> Iterator[Unit]:
    """The units of a model, whose variants `entries` are."""
    for variant, skew, parts in _VARIANTS:
        is_copied = variant.startswith("copied")
        entry = entries.get(variant.replace("copied", "layers_dense"))
        # With no hot neurons there are none to be chosen.
        if entry is None or not set(parts) & set(options.only) or not (skew or entry["hot"]):
            continue
        # What was planned for another share of firing neurons is measured with that.
        active = entry["plan"]["computed"] if entry["plan"] else options.active
        facts = {key: entry[key] for key in _OF_MODEL} | {"variant": variant, "skew": skew, "active": active}
        kind, needs_exchange = ("copied", False) if is_copied else ("model", variant != "cpu")
        content = entry | {"skew": skew, "active": active}
        yield Unit(kind, "models", content, facts, options.limit, needs_exchange=needs_exchange)


def memory_unit(groups: list[list[Unit]]) -> Unit | None:
    """Return what asks the machine for the memory of the largest model, None where there is no model."""
    needed = most_bytes(groups)
    content = {"bytes": int(_TOUCHED_SHARE * needed), "limit_s": _MEMORY_S}
    return Unit("memory", "facts", content, {}, _MEMORY_S + 10.0) if needed else None


def most_bytes(groups: list[list[Unit]]) -> int:
    """Return the bytes of the largest file of weights that `groups` need."""
    units = (unit for group in groups for unit in group if unit.kind != "copied")
    return max((unit.content.get("weight_bytes", 0) for unit in units), default=0)
