"""Plans to report on: of random figures, which fit one another."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from picompile.placement.machine import Machine
from picompile.placement.plan import MemoryRow, Plan, PlanLayer

MARGIN = 0.05
GPU_BYTES, HOST_BYTES = 24_000_000_000, 64_000_000_000


def random_plan(seed: int, layers: int = 5, **changes: Any) -> Plan:
    """A plan whose first layers are hot and cold at once and whose last ones are on the host."""
    random = np.random.default_rng(seed)
    rows = tuple(random_layer(random, number, split=number < max(1, layers - 2)) for number in range(layers))
    memory = (
        *(
            MemoryRow("accelerator", what, int(random.integers(1e8, 5e9)))
            for what in ("attention", "hot neurons", "workspace")
        ),
        *(MemoryRow("host", what, int(random.integers(1e8, 9e9))) for what in ("attention", "cold neurons", "tables")),
    )
    plan = Plan(
        model="some-model",
        fingerprint=None,
        parameters=123_456_789,
        quant="q4",
        predictor="learned",
        context=2048,
        sequences=1,
        tokens=1024,
        target="4090",
        machine=Machine(int(GPU_BYTES * (1 - MARGIN)), 1.008e12, int(HOST_BYTES * (1 - MARGIN)), 6.7e10, 3.15e10, 1e-5),
        accelerator_budget_bytes=GPU_BYTES,
        host_budget_bytes=HOST_BYTES,
        margin=MARGIN,
        objective="latency",
        firing="the curve some",
        layers=rows,
        head="accelerator",
        head_s=3e-4,
        switch_s=2e-5,
        memory=memory,
        token_s=sum(layer.total_s for layer in rows) + 3e-4,
        gap=8.5e-5,
        baselines={"layers-first": 2.5, "host": 1.25},
    )
    return replace(plan, **changes)


def random_layer(random: np.random.Generator, number: int, *, split: bool) -> PlanLayer:
    """One layer: with neurons on both devices if `split`, else all of it on the host."""
    neurons = int(random.integers(100, 9999))
    hot = int(random.integers(1, neurons)) if split else 0
    computed = float(random.uniform(0.05, 0.3) * neurons)
    side = "accelerator" if split else "host"
    names = ("attention_s", "kv_cache_s", "predict_s", "hot_s", "cold_s", "exchange_s")
    seconds = {name: float(random.uniform(5e-5, 5e-4)) for name in names}
    if not split:
        seconds |= {"hot_s": 0.0, "exchange_s": 0.0}
    before = seconds["attention_s"] + seconds["kv_cache_s"] + seconds["predict_s"]
    return PlanLayer(
        layer=number,
        neurons=neurons,
        hot_neurons=hot,
        attention=side,
        kv_cache=side,
        predictor=side,
        computed=computed,
        hot_computed=float(random.uniform(0.3, 1)) * computed if split else 0.0,
        **seconds,
        total_s=before + max(seconds["hot_s"], seconds["cold_s"]) + seconds["exchange_s"],
        limit="attention",
    )


def write_plan_file(path: Path, plan: Plan, **changes: Any) -> Path:
    """The file of a plan, with some of its entries changed."""
    path.write_text(json.dumps({**plan.to_json(), **changes}), encoding="utf-8")
    return path
