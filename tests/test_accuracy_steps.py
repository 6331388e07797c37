"""Compilation with a bound on the distance from the checkpoint: what is measured, on what, and what is refused."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.support import BUNDLED_MODEL, Cli
from picompile import accuracy_steps
from picompile.accuracy.variants import Variant
from picompile.compile import compile_model
from picompile.config import CompileOptions, resolve
from picompile.errors import AccuracyError, UsageError
from picompile.frontend import load_model
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.windows import checkpoint_tokenizer
from picompile.rounding import RoundingOptions, calibration_text
from picompile.skipping.calibration import _windows
from test_prediction import held_out, write_predictors

__all__ = ["held_out"]

SMALL: dict[str, Any] = {"context": 128, "gate_tokens": 1024}


def _compared(artifact: Path, model: Path = BUNDLED_MODEL, **options: Any) -> dict[str, Any]:
    compile_model(model, artifact, CompileOptions(**{**SMALL, "accuracy": float("inf"), **options}))
    report = json.loads((artifact / "report.json").read_text())
    found: dict[str, Any] = report["checkpoint_accuracy"]
    return found


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_more_bits_are_nearer_to_the_checkpoint(tmp_path: Path) -> None:
    found = {form: _compared(tmp_path / form, quant=form) for form in ("q4", "q8")}
    for form, comparison in found.items():
        assert [line["part"] for line in comparison["lines"]] == ["weights", "kv_cache", "runtime"]
        assert [line["title"] for line in comparison["lines"]][:2] == [f"weights in {form}", "KV cache in f16"]
        assert comparison["bound"] is None and 900 < comparison["tokens"] < 1024
        low, high = comparison["kl_nats_interval"]
        assert 0 < low < comparison["kl_nats"] < high
        whole = comparison["lines"][-1]
        assert sum(line["added_change"] for line in comparison["lines"]) == pytest.approx(comparison["relative_change"])
        assert whole["perplexity"] == pytest.approx(
            comparison["checkpoint_perplexity"] * (1 + comparison["relative_change"])
        )
        manifest = json.loads((tmp_path / form / "manifest.json").read_text())
        assert manifest["checkpoint_accuracy"] == {key: comparison[key] for key in comparison if key != "lines"}
        assert "accuracy" not in manifest
    assert found["q4"]["checkpoint_perplexity"] == found["q8"]["checkpoint_perplexity"]
    assert found["q8"]["kl_nats_interval"][1] < found["q4"]["kl_nats_interval"][0]
    assert found["q8"]["same_top_share"] > found["q4"]["same_top_share"]


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
@pytest.mark.parametrize(("kv_dtype", "least", "change"), [("q8", 1e-5, 1e-4), ("q4", 1e-3, 1e-3)])
def test_the_cache_is_rounded_as_the_artifact_rounds_it(
    tmp_path: Path, kv_dtype: str, least: float, change: float
) -> None:
    cache, runtime = _compared(tmp_path / "artifact", quant="f16", kv_dtype=kv_dtype)["lines"]
    assert (cache["part"], runtime["part"]) == ("kv_cache", "runtime")
    assert cache["kl_nats"] > least
    assert abs(runtime["added_kl_nats"]) < 0.1 * cache["kl_nats"]
    assert abs(runtime["added_change"]) < change


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_nothing_lossy_leaves_the_runtime(tmp_path: Path) -> None:
    (line,) = _compared(tmp_path / "artifact", quant="f16", kv_dtype="f32", accuracy=0.001)["lines"]
    assert line["part"] == "runtime"
    assert line["kl_nats"] < 1e-5 and abs(line["relative_change"]) < 1e-4


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_weights_are_to_blame(cli: Cli, tmp_path: Path) -> None:
    ended = cli(
        "compile", BUNDLED_MODEL, "-o", tmp_path / "artifact", "--quant", "q4", "--rounding", "nearest",
        "--context", 128, "--gate-tokens", 1024, "--accuracy", "0.1%",
    )  # fmt: skip
    assert (ended.code, ended.out, ended.err.count("\n")) == (7, "", 1)
    for said in (
        "more than 0.1 %",
        "most is lost by weights in q4",
        "--quant q4m or q6",
        "rounding (--work DIR)",
    ):
        assert said in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_predictors_are_to_blame(held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(BUNDLED_MODEL, tmp_path / "predictors", bias=0.0)
    options = CompileOptions(
        context=128,
        gate_tokens=300,
        quant="q8",
        predictor="learned",
        predictors=predictors,
        calibration=(held_out,),
        gate=None,
        accuracy=0.02,
    )
    with pytest.raises(
        AccuracyError, match=r"most is lost by predictors \(weights in q8 .*or larger predict"
    ) as refused:
        compile_model(BUNDLED_MODEL, tmp_path / "artifact", options)
    assert refused.value.exit_code == 7
    assert [path.name for path in tmp_path.iterdir()] == ["predictors"]


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_an_artifact_with_predictors_has_both_figures(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    """Its last streamed graph has the same masks as the artifact."""
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    options = {"predictor": "learned", "predictors": predictors, "calibration": (held_out,), "gate": math.inf}
    hot = {0: range(0, 200, 3)}
    found = _compared(tmp_path / "artifact", tiny_model, context=64, gate_tokens=200, quant="q8", hot=hot, **options)
    weights, chosen, cache, runtime = found["lines"]
    assert [line["part"] for line in found["lines"]] == ["weights", "predictors", "kv_cache", "runtime"]
    assert chosen["kl_nats"] > 10 * weights["kl_nats"]
    assert runtime["kl_nats"] == pytest.approx(chosen["kl_nats"], rel=0.05)
    assert cache["kl_nats"] == pytest.approx(chosen["kl_nats"], rel=0.05)
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    assert manifest["accuracy"]["bound"] is None
    assert "layers" not in manifest["accuracy"] and "lines" not in manifest["checkpoint_accuracy"]


def test_what_weights_are_rounded_for_is_not_read(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"value_{number} = compute({number}) # {number * number}\n" for number in range(9000)))
    options = CompileOptions(quant="q4", calibration=(text,), accuracy=0.01)
    config = resolve(options, load_model(BUNDLED_MODEL).facts)
    found = accuracy_steps._held_out(BUNDLED_MODEL, None, config)
    assert found.source == f"the end of {text}"
    read = calibration_text(BUNDLED_MODEL, RoundingOptions((text,))).calibration.flatten().tolist()
    decode = checkpoint_tokenizer(BUNDLED_MODEL, 4096).decode
    rounded_for = set(decode(read).split("\n"))
    assert len(rounded_for) > 1000
    for window in found.windows:
        assert not rounded_for.intersection(decode(window).split("\n")[1:-1])


def test_what_limits_are_searched_on_is_not_read(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"value_{number} = compute({number}) # {number * number}\n" for number in range(9000)))
    options = CompileOptions(quant="q8", calibration=(text,), accuracy=0.01, skip=0.01, skip_tokens=30_000)
    config = resolve(options, load_model(BUNDLED_MODEL).facts)
    assert config.skipping is not None
    found = accuracy_steps._held_out(BUNDLED_MODEL, None, config)
    assert found.source == f"the end of {text}"
    learning, measuring, _ = _windows(BUNDLED_MODEL, config.skipping.options)
    decode = checkpoint_tokenizer(BUNDLED_MODEL, 4096).decode
    searched_on = {line for window in (*learning, *measuring) for line in decode(window).split("\n")[1:-1]}
    assert len(searched_on) > 1000
    for window in found.windows:
        assert not searched_on.intersection(decode(window).split("\n")[1:-1])


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_thresholds_have_a_line(
    tiny_model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where they are not zero, and where there are predictors."""
    seen: list[Variant] = []
    variants = accuracy_steps._variants

    def with_thresholds(artifact: Any, predictors: Any, *others: Any) -> Iterator[Variant]:
        predictors.firing_rules.update({0: FiringRule(0.3), 1: FiringRule()})
        for variant in variants(artifact, predictors, *others):
            seen.append(variant)
            yield variant

    monkeypatch.setattr(accuracy_steps, "_variants", with_thresholds)
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=1e4)
    options = {"predictor": "learned", "predictors": predictors, "calibration": (held_out,), "gate": math.inf}
    found = _compared(tmp_path / "artifact", tiny_model, context=64, gate_tokens=200, quant="q8", **options)
    weights, thresholds, chosen, *_ = found["lines"]
    assert [variant.part for variant in seen] == ["weights", "thresholds", "predictors", "kv_cache"]
    assert thresholds["title"] == "thresholds" and len(seen[1].replaced) == 1
    assert thresholds["kl_nats"] > 2 * weights["kl_nats"]
    # These predictors choose every neuron.
    assert chosen["kl_nats"] == pytest.approx(weights["kl_nats"], rel=1e-3)


def test_models_that_cannot_be_compared(tiny_model: Path, tmp_path: Path) -> None:
    options = CompileOptions(accuracy=0.01)
    with pytest.raises(UsageError, match="not with a module in memory"):
        compile_model(load_model(tiny_model), tmp_path / "artifact", options)
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in tiny_model.iterdir():
        if "token" not in path.name:
            (bare / path.name).symlink_to(path)
    with pytest.raises(UsageError, match=r"--accuracy reads text, and the model has no tokenizer.json"):
        compile_model(bare, tmp_path / "artifact", options)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


@pytest.mark.parametrize("bound", [-0.1, float("nan")])
def test_bounds_that_make_no_sense(bound: float) -> None:
    with pytest.raises(UsageError, match="the bound on accuracy"):
        CompileOptions(accuracy=bound)


def test_a_text_may_be_given_to_compare_on() -> None:
    assert CompileOptions(quant="q8", accuracy=0.01, calibration=(Path("text"),)).calibration == (Path("text"),)
    with pytest.raises(UsageError, match="needs none"):
        CompileOptions(quant="q8", calibration=(Path("text"),))
