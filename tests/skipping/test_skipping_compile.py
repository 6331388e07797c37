"""Compilations that skip what contributes little."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.decoders import Llama
from helpers.support import BuildOnce, Cli, save_tiny_llama
from picompile import CompileOptions, capture_module
from picompile.cli.skipping_show import skipping_text
from picompile.compile import compile_model
from picompile.errors import UsageError
from picompile_runtime import load

_TEXT = "Neurons that contribute little are left out, and the text stays as likely as it was. " * 120
_SMALL: dict[str, Any] = {"context": 64, "skip_tokens": 2048, "quant": "f16"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(_TEXT)
    return path


@pytest.fixture(scope="module")
def silu_model(build_once: BuildOnce) -> Path:
    return build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))


def _compile(model: Path, output: Path, **options: Any) -> dict[str, Any]:
    compile_model(model, output, CompileOptions(**{**_SMALL, **options}))
    report: dict[str, Any] = json.loads((output / "report.json").read_text())
    return report


@pytest.mark.slow("measures and compiles a model twice")
def test_a_silu_model_skips_and_keeps_its_bytes(silu_model: Path, text: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    options = {"skip": 0.05, "calibration": (text,), "work": work}
    first = _compile(silu_model, tmp_path / "first", **options)["skipping"]
    kept = {path: path.stat().st_mtime_ns for path in (work / "skipping").iterdir()}
    second = _compile(silu_model, tmp_path / "second", **options)["skipping"]
    assert first == second
    assert kept == {path: path.stat().st_mtime_ns for path in (work / "skipping").iterdir()}
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    assert first["relative_change"] < 0.05
    assert {name.rpartition(".")[2] for name in first["left_out"]} == {"gate_limits", "output_limits"}
    for layer in (0, 1):
        gate, output = (first["left_out"][f"predictors.layers.{layer}.{site}_limits"] for site in ("gate", "output"))
        assert 0 < gate <= output < 1
    with load(tmp_path / "first") as engine:
        engine.reset()
        for token in b"Neurons that contribute little":
            engine.decode(token)
        counts = engine.firing()
    assert all(row.computed_share < 1 and row.fired_share <= row.computed_share for row in counts)


@pytest.mark.slow("measures and compiles a model")
def test_the_accuracy_table(silu_model: Path, text: Path, tmp_path: Path) -> None:
    options = {"skip": 0.05, "checkpoint_bound": float("inf"), "calibration": (text,), "check_tokens": 256}
    report = _compile(silu_model, tmp_path / "artifact", **options)
    lines = report["checkpoint_accuracy"]["lines"]
    assert [line["part"] for line in lines] == ["skipping", "kv_cache", "runtime"]
    # The artifact leaves out what the graph leaves out.
    assert lines[0]["kl_nats"] > 10 * max(abs(line["added_kl_nats"]) for line in lines[1:])


@pytest.mark.slow("measures and compiles a model")
def test_the_command_says_what_is_left_out(cli: Cli, silu_model: Path, text: Path, tmp_path: Path) -> None:
    words = ("compile", silu_model, "-o", tmp_path / "artifact", "--context", 64, "--quant", "f16", "--skip", "5%")
    ended = cli(*words, "--skip-at", "output", "--skip-tokens", 2048, "--calibration", text)
    assert ended.code == 0, ended.err
    assert "left out: " in ended.out and "% of neurons by output" in ended.out and "by gate" not in ended.out
    skipping = json.loads((tmp_path / "artifact" / "report.json").read_text())["skipping"]
    assert json.loads(cli("inspect", tmp_path / "artifact", "--json").out)["skipping"] == skipping
    assert "% of neurons by output" in cli("inspect", tmp_path / "artifact").out


def test_a_damaged_report_is_told() -> None:
    for damaged in ({}, {"left_out": None}, {"left_out": {}, "relative_change": "x", "tokens": 1}):
        assert skipping_text(damaged) == "cannot be read"


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    for wrong, why in (
        ({"skip": 0.0}, "above 0"),
        ({"skip": float("nan")}, "above 0"),
        ({"skip": 0.01, "skip_at": ("head",)}, "unknown place to skip 'head'"),
        ({"skip": 0.01, "skip_at": ("gate", "gate")}, "each place to skip once"),
        ({"skip_at": ("gate",)}, "not how much skipping may cost"),
        ({"skip": 0.01, "predictor": "exact"}, "leave one of them out"),
        ({"skip": 0.01, "skip_tokens": 1}, "at least 512"),
    ):
        with pytest.raises(UsageError, match=why):
            CompileOptions(**wrong)
    with pytest.raises(UsageError, match="skip needs a model folder"):
        compile_model(capture_module(Llama()), tmp_path / "artifact", CompileOptions(**_SMALL, skip=0.01))
    assert not list(tmp_path.iterdir())
