"""A plan's file: what was written is read, and what is damaged is refused in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.damage import STRANGE, Place, places, replaced, strange_values, without
from helpers.random_tasks import random_task
from picompile.errors import DoesNotFitError, UsageError
from picompile.placement.firing import Firing
from picompile.placement.plan import Plan
from picompile.placement.plan_file import read_plan, write_plan
from picompile.placement.planning import PlanOptions, make_plan


def random_plan(seed: int, *, numbered: bool) -> Plan:
    """A plan of a random model that fits; of neurons with numbers, or of a curve."""
    random = np.random.default_rng(seed)
    for number in range(1000):
        task = random_task(seed + number)
        layers = tuple(
            replace(layer, order=random.permutation(len(layer.shares)) if numbered else None)
            for layer in task.firing.layers
        )
        options = PlanOptions("random", task.machine, fingerprint="ab" * 32 if numbered else None)
        try:
            return make_plan(task.model, Firing(layers, "chance"), options)
        except DoesNotFitError:
            continue
    raise AssertionError("nothing fits")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """With hot neurons in it."""
    plans = (random_plan(seed, numbered=True) for seed in range(0, 100_000, 1000))
    return next(plan for plan in plans if any(layer.hot for layer in plan.layers))


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> Path:
    write_plan(tmp_path / "plan.json", plan)
    return tmp_path / "plan.json"


@settings(max_examples=6)
@given(st.integers(0, 2**31), st.booleans())
def test_a_written_plan_is_read_back(tmp_path_factory: pytest.TempPathFactory, seed: int, numbered: bool) -> None:
    written = random_plan(seed, numbered=numbered)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(path, written)
    assert read_plan(path) == written
    content = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert content == json.loads(json.dumps(written.to_json()))
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def change(path: Path, *place: str | int, value: Any) -> None:
    path.write_text(json.dumps(replaced(json.loads(path.read_text()), place, value)))


def change_hot(path: Path, change_list: Callable[[list[int], int], object]) -> None:
    """Change the numbers of a layer with hot neurons."""
    layers = json.loads(path.read_text())["layers"]
    number, layer = next((number, layer) for number, layer in enumerate(layers) if layer["hot"])
    change(path, "layers", number, "hot", value=change_list(layer["hot"], layer["neurons"]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: p.unlink(), "no such file"),
    (lambda p: (p.unlink(), p.mkdir()), "is no file"),
    (cut, "not readable as JSON"),
    (lambda p: p.write_text('{"format": "picompile-profile"}'), "is not a plan"),
    (lambda p: change(p, "schema", value=1), "has schema 1, not 5; plan again"),
    (lambda p: change(p, "layers", 0, "layer", value=1), "all layers in order"),
    (lambda p: change(p, "layers", 0, "attention", value="disk"), "one of accelerator, host"),
    (lambda p: change(p, "layers", 0, "total_s", value=-1.0), "total_s must be a number from 0"),
    (lambda p: change_hot(p, lambda hot, neurons: hot[1:]), "hot must be null or a list of"),
    (lambda p: change_hot(p, lambda hot, neurons: hot[::-1]), "in order, each once"),
    (lambda p: change_hot(p, lambda hot, neurons: [hot[0], *hot[:-1]]), "in order, each once"),
    (lambda p: change(p, "machine", "gpu_bytes", value=-1), "gpu_bytes must be an integer"),
    (lambda p: change(p, "baselines", "host", value="fast"), "baselines: host must be a number"),
    (lambda p: change(p, "tokens_per_s", value=1e-3), "tokens_per_s must be sequences over token_s"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=[says for _, says in DAMAGES])
def test_damage_is_refused(path: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(path)
    with pytest.raises(UsageError) as caught:
        read_plan(path)
    text = str(caught.value)
    assert says in text and str(path) in text and "\n" not in text


def read_or_refuse(path: Path, content: Any) -> Plan | None:
    """The plan in a file of this content, None where it is refused, in one line."""
    path.write_text(json.dumps(content))
    try:
        return read_plan(path)
    except UsageError as error:
        assert "\n" not in str(error)
        return None


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> tuple[Path, Any]:
    """A file, and what is in it: one layer with few hot neurons listed, since every place in it is damaged."""
    path = tmp_path_factory.mktemp("small") / "plan.json"
    first = next(layer for layer in plan.layers if layer.hot)
    one = replace(first, layer=0, hot_neurons=3, hot=(0, 1, first.neurons - 1))
    write_plan(path, replace(plan, layers=(one,), memory=plan.memory[:1]))
    assert read_plan(path).layers == (one,)
    return path, json.loads(path.read_text())


@pytest.mark.slow("reads a plan for each field and each strange value")
def test_every_field_of_a_plan_is_required_and_strange_values_are_harmless(small: tuple[Path, Any]) -> None:
    path, content = small
    for place in places(content):
        for value in STRANGE:
            _hold(path, replaced(content, place, value), place)
        # A shorter memory account, fewer baselines, or a plan of an earlier version are a plan too.
        later = ("experts", "chosen", "host_dense_efficiency", "host_tokens_per_s")
        # Other programs read these; we make them of other fields.
        derived = place[0] in ("gains", "without_gpu_tokens_per_s")
        is_plan = (place[0] in ("memory", "baselines") and len(place) == 2) or place[-1] in later or derived
        if not is_plan:
            assert read_or_refuse(path, without(content, place)) is None, place


@settings(max_examples=100)
@given(st.data())
def test_any_values_are_refused_or_harmless(small: tuple[Path, Any], data: st.DataObject) -> None:
    path, content = small
    place = data.draw(st.sampled_from(list(places(content))))
    _hold(path, replaced(content, place, data.draw(strange_values)), place)


def _hold(path: Path, content: Any, place: Place) -> None:
    """Assert that an accepted file is a plan that can be printed, written and compiled with."""
    found = read_or_refuse(path, content)
    if found is None:
        return
    json.dumps(found.to_json(), allow_nan=False)
    json.dumps(found.to_json(), ensure_ascii=False).encode()
    for layer in found.layers:
        assert layer.hot is None or (
            len(layer.hot) == layer.hot_neurons and set(layer.hot) <= set(range(layer.neurons))
        )
    assert found.tokens_per_s > 0, place
