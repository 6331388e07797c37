"""The schedules of `benchmarks.gpu`: what each command does, in which order, and when each part must have ended.

A GPU may be lent for 900 s in all. The times of the first command are seconds from the asking for the machine: if
starting it takes longer than `START_S`, all parts end later by as much. Those of the others are seconds from the
command's own beginning. What a part cannot do in its time is ended, and the next part begins; what is done early
leaves its time to the parts behind it.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.units import Unit

Result = dict[str, Any]

# The time for starting a machine and bringing the files there.
START_S = 120.0
# No machine is started that soon or late: clocks that disagree say nothing, nor does a time that was taken there.
_SOONEST_S, _LATEST_S = 5.0, 600.0
# A small kernel; a kernel that is timed; all else has what its part has.
_SMALL_S, _TIMED_S, _REST_S = 10.0, 45.0, 600.0
_THREADS = 16
# A step of llama-70b has 726 launches.
MOST_LAUNCHES = 1500
PROMPTS, DEPTH = (64, 512, 1536), 512
_LARGE, PLANNED = "llama-70b", "hybrid_4090"
# Kernels that the first command times, and for which shares of their neurons.
FIRST_KERNELS: Mapping[str, tuple[float, ...]] = {
    "linear 8192x8192 q4": (),
    "linear with norm 8192x8192 q4": (),
    "ffn masked 28672x8192 q4": (0.1, 0.2),
    "predictor 28672x1024 q6": (),
    "attention 512 float16": (),
    "attention 4096 float16": (),
    "send": (),
    "receive": (),
    "upload": (),
    "linear 512 rows 8192x8192 q4": (),
    "ffn dense 512 rows 28672x8192 q4": (),
    "ffn masked 28672x8192 f16": (0.1,),
    "linear 8192x8192 f16": (),
    "ffn part, shared 28672x8192 q4": (0.1,),
    "send mask": (),
}
_OF_MODEL = ("model", "quant", "budget", "dense_bytes", "hot", "resident_layers", "plan")


@dataclass(frozen=True)
class Part:
    """Units that must have ended `ends_s` seconds after the clock's zero. Facts of their rows name the part.

    Where a kernel was found wrong before, a part that `yields` leaves its time to the sanitizer.
    """

    name: str
    ends_s: float
    units: Sequence[Unit]
    yields: bool = False


@dataclass(frozen=True)
class Clock:
    """Turns the times of a schedule into those of the monotonic clock."""

    zero_s: float
    scale: float = 1.0

    def at(self, seconds: float) -> float:
        """Return when so many seconds of the schedule are over."""
        return self.zero_s + seconds * self.scale

    def now(self) -> float:
        """Return how many seconds of the schedule are over."""
        return (time.monotonic() - self.zero_s) / self.scale


def clock(asked: float | None, begin_s: float, scale: float) -> Clock:
    """Return the clock of the first command, which began at `begin_s` of the monotonic clock.

    `asked` is when the machine was asked for, in seconds since 1970. If it is None, or cannot be that time, `START_S`
    are assumed to have passed.
    """
    passed = time.time() - (asked or 0.0) - (time.monotonic() - begin_s)
    passed = passed if _SOONEST_S <= passed <= _LATEST_S else START_S
    return Clock(begin_s - min(passed, START_S) * scale, scale)


def threads() -> int:
    """Return with how many threads of the CPU models run: one a core, and no more than were planned for."""
    return min(_THREADS, len(os.sched_getaffinity(0)))


def parts_of(verb: str, options: Namespace, pack: Result) -> list[Part]:
    """Return the schedule of a command; the facts of each unit name its part."""
    parts = SCHEDULES[verb](options, pack)
    return [
        replace(part, units=[replace(unit, facts={"part": part.name, **unit.facts}) for unit in part.units])
        for part in parts
    ]


def _first(options: Namespace, pack: Result) -> list[Part]:
    small = _smallest(pack)
    machine = [
        Unit("machine", "facts", small, {}, _REST_S, is_gate=True),
        Unit("ping_pong", "facts", small, {}, _REST_S, is_gate=True),
        Unit("queue", "facts", small | {"most": MOST_LAUNCHES}, {}, _REST_S, is_gate=True),
    ]
    checks = [*_checks(pack, "q4", "hybrid"), *_bundled(pack, "q4", "split"), *_bundled(pack, "f16", "split")]
    checks += [each for each in (*_checks(pack), *_bundled(pack)) if each not in checks]
    # The model that is trained, and says most, behind the six that say where it fails.
    checks.sort(key=lambda unit: unit.kind == "bundled")
    large = _entry(pack, PLANNED)
    smoke = [] if large is None else [_model(options, large, "smoke", table="checks")]
    return [
        Part("machine", 150, machine),
        Part("small kernels", 185, _kernels(pack, "small", _SMALL_S)),
        Part("models", 225, checks),
        Part("smoke", 265, smoke),
        Part("kernel times", 310, [*_limits(pack), *_timed(pack, first=True)], yields=True),
    ]


def _second(options: Namespace, pack: Result) -> list[Part]:
    half = max(1, threads() // 2)
    facts = _smallest(pack)
    return [
        Part("hybrid", 60, [Unit("machine", "facts", facts, {}), *_of(options, pack, PLANNED)]),
        # With the same weights, before others are written over them.
        Part("half the threads", 90, _of(options, pack, PLANNED, prompts=PROMPTS[:1], count=half)),
        Part("copied", 115, _of(options, pack, "copied_4090")),
        Part("llama.cpp", 200, _llama(pack)),
        Part("dense", 265, _of(options, pack, "layers_dense_4090", prompts=PROMPTS[:2])),
        Part("third", 355, [*_of(options, pack, "hybrid"), *_of(options, pack, "copied")]),
        Part("kernel times", 440, [Unit("host", "facts", facts, {}), *_timed(pack, first=False)]),
    ]


SCHEDULES: Mapping[str, Callable[[Namespace, Result], list[Part]]] = {
    "first": _first,
    "second": _second,
}


def _smallest(pack: Result) -> Result:
    """Return the files of a pack that have what the machine itself is tried with."""
    return {"folder": pack["kernels"][0]["folder"], "host": pack["host"]}


def _entry(pack: Result, variant: str) -> Result | None:
    """Return the pack's entry for a variant; copies are of the same layers as the dense one."""
    name = variant.replace("copied", "layers_dense")
    return next((each for each in pack["models"] if (each["model"], each["variant"]) == (_LARGE, name)), None)


def _of(
    options: Namespace,
    pack: Result,
    variant: str,
    *,
    prompts: Sequence[int] = PROMPTS,
    count: int | None = None,
) -> list[Unit]:
    entry = _entry(pack, variant)
    if entry is None:
        return []
    kind = "copied" if variant.startswith("copied") else "model"
    return [_model(options, entry | {"variant": variant}, kind, prompts=list(prompts), threads=count or threads())]


def _model(options: Namespace, entry: Result, kind: str, table: str = "models", **plan: Any) -> Unit:
    content = entry | {"active": active_of(entry, options.active), "threads": threads(), **plan}
    facts = {key: entry[key] for key in _OF_MODEL}
    facts |= {"variant": entry["variant"], "active": content["active"]}
    if table == "checks":
        facts = {"label": f"{entry['model']} {entry['quant']} {entry['variant']}, {kind}"}
    return Unit(kind, table, content, facts, _REST_S)


def active_of(entry: Result, active: float) -> float:
    """Return the share of neurons to compute: what was planned for another share is measured with that."""
    return float(entry["plan"]["computed"]) if entry["plan"] else active


def _checks(pack: Result, *wanted: str) -> list[Unit]:
    return _checked("check", pack["checks"], wanted)


def _bundled(pack: Result, *wanted: str) -> list[Unit]:
    return _checked("bundled", pack["bundled"], wanted)


def _checked(kind: str, entries: Sequence[Result], wanted: Sequence[str]) -> list[Unit]:
    found = [entry for entry in entries if not wanted or [entry["quant"], entry["variant"]] == list(wanted)]
    return [
        Unit(kind, "checks", entry | {"threads": threads()},
             {"label": f"{entry['model']} {entry['quant']} {entry['variant']}"}, _REST_S)
        for entry in found
    ]  # fmt: skip


def _limits(pack: Result) -> list[Unit]:
    speed = [group["folder"] for group in pack["kernels"] if group["folder"] == "speed"]
    return [Unit("limits", "facts", {"folder": folder}, {}, _REST_S) for folder in speed]


def _kernels(pack: Result, folder: str, limit_s: float) -> list[Unit]:
    groups = [group for group in pack["kernels"] if group["folder"] == folder]
    facts = {"folder": folder}
    return [
        Unit("kernel", "kernels", case | facts, {"label": case["label"], **facts}, limit_s)
        for group in groups
        for case in group["cases"]
    ]


def _timed(pack: Result, first: bool) -> Iterator[Unit]:
    """Yield the kernels of the first command, in its order; or the others, and other shares of these."""
    units = {unit.facts["label"]: unit for unit in _kernels(pack, "speed", _TIMED_S)}
    if first:
        for label, shares in FIRST_KERNELS.items():
            if label in units:
                yield _with_shares(units[label], shares)
        return
    for label, unit in units.items():
        left = [share for share in unit.content["shares"] if share not in FIRST_KERNELS.get(label, ())]
        if left or label not in FIRST_KERNELS:
            yield _with_shares(unit, left)


def _with_shares(unit: Unit, shares: Sequence[float]) -> Unit:
    return replace(unit, content={**unit.content, "shares": list(shares)})


def _llama(pack: Result) -> list[Unit]:
    """llama.cpp with the memory of the hybrid engine that was planned, and dense offloading's layers in it."""
    entry, dense = _entry(pack, PLANNED), _entry(pack, "layers_dense_4090")
    if entry is None or dense is None or pack["llama"] is None:
        return []
    content = {"file": pack["llama"], "gguf": entry["gguf"], "model": entry["model"], "threads": threads()}
    content["layers"] = dense["resident_layers"]
    facts = {key: entry[key] for key in ("model", "quant", "budget", "dense_bytes")}
    facts |= {"label": "llama.cpp", "variant": "llama.cpp", "hot": 0, "resident_layers": dense["resident_layers"]}
    return [Unit("llama", "models", content, facts, _REST_S)]


def case_units(pack: Result, label: str) -> list[Unit]:
    """Return what checks one kernel alone."""
    units = [unit for group in pack["kernels"] for unit in _kernels(pack, group["folder"], _TIMED_S)]
    found = [unit for unit in units if unit.facts["label"] == label]
    if not found:
        sys.exit(f"the pack has no kernel {label!r}, but {', '.join(unit.facts['label'] for unit in units)}")
    return [Unit("machine", "facts", _smallest(pack), {}, is_gate=True), *found]
