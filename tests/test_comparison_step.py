"""Compilation with a bound on the distance from the checkpoint: what is measured, on what, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers.support import BUNDLED_MODEL, Cli, save_tiny_llama
from picompile.compile import compile_model
from picompile.compile.comparison import _held_out
from picompile.config import CompileOptions, resolve
from picompile.errors import AccuracyError, UsageError
from picompile.frontend.hf import load_model
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.windows import checkpoint_tokenizer, checkpoint_windows
from picompile.skipping.calibration import _windows
from picompile.skipping.options import SENSITIVITY_TOKENS
from test_prediction import held_out, write_predictors

__all__ = ["held_out"]

SMALL: dict[str, Any] = {"context": 128, "check_tokens": 1024}


def _compared(artifact: Path, model: Path = BUNDLED_MODEL, **options: Any) -> dict[str, Any]:
    compile_model(model, artifact, CompileOptions(**{**SMALL, "checkpoint_bound": float("inf"), **options}))
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
def test_the_cache_is_rounded_as_the_artifact_rounds_it(tmp_path: Path) -> None:
    """And where nothing is lossy, the runtime's arithmetic is all there is."""
    for kv_dtype, least, change in (("q8", 1e-5, 1e-4), ("q4", 1e-3, 1e-3)):
        cache, runtime = _compared(tmp_path / kv_dtype, quant="f16", kv_dtype=kv_dtype)["lines"]
        assert (cache["part"], runtime["part"]) == ("kv_cache", "runtime")
        assert cache["kl_nats"] > least
        assert abs(runtime["added_kl_nats"]) < 0.1 * cache["kl_nats"]
        assert abs(runtime["added_change"]) < change
    (line,) = _compared(tmp_path / "f32", quant="f16", kv_dtype="f32", checkpoint_bound=0.001)["lines"]
    assert line["part"] == "runtime"
    assert line["kl_nats"] < 1e-5 and abs(line["relative_change"]) < 1e-4


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_weights_are_to_blame(cli: Cli, tmp_path: Path) -> None:
    words = (
        "--quant",
        "mxfp4",
        "--rounding",
        "nearest",
        "--context",
        128,
        "--check-tokens",
        1024,
        "--checkpoint-bound",
        "0.1%",
    )
    ended = cli("compile", BUNDLED_MODEL, "-o", tmp_path / "artifact", *words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (7, "", 1)
    for said in ("more than 0.1 %", "most is lost by weights in mxfp4", "--quant q4 or q6"):
        assert said in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_predictors_are_to_blame(held_out: Path, tmp_path: Path) -> None:
    predictors = write_predictors(BUNDLED_MODEL, tmp_path / "predictors", bias=0.0)
    options = {"predictor": "learned", "predictors": predictors, "calibration": (held_out,), "accuracy_bound": None}
    with pytest.raises(AccuracyError, match=r"most is lost by predictors \(weights in q8 .*or larger pred") as refused:
        _compared(tmp_path / "artifact", quant="q8", check_tokens=300, checkpoint_bound=0.02, **options)
    assert refused.value.exit_code == 7
    assert [path.name for path in tmp_path.iterdir()] == ["predictors"]


@pytest.mark.slow("compiles a model and compares it with its checkpoint; one is fast")
def test_an_artifact_with_predictors_has_both_figures(tiny_model: Path, held_out: Path, tmp_path: Path) -> None:
    """Its last streamed graph has the same masks as the artifact."""
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias=0.0)
    options = {"predictor": "learned", "predictors": predictors, "calibration": (held_out,), "accuracy_bound": math.inf}
    hot = {0: range(0, 200, 3)}
    found = _compared(tmp_path / "artifact", tiny_model, context=64, check_tokens=200, quant="q8", hot=hot, **options)
    weights, chosen, cache, runtime = found["lines"]
    assert [line["part"] for line in found["lines"]] == ["weights", "predictors", "kv_cache", "runtime"]
    assert chosen["kl_nats"] > 10 * weights["kl_nats"]
    assert runtime["kl_nats"] == pytest.approx(chosen["kl_nats"], rel=0.05)
    assert cache["kl_nats"] == pytest.approx(chosen["kl_nats"], rel=0.05)
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    assert manifest["accuracy"]["bound"] is None
    assert "layers" not in manifest["accuracy"] and "lines" not in manifest["checkpoint_accuracy"]


@pytest.mark.slow("compiles a model with a search; without is fast", but=("rounding",))
@pytest.mark.parametrize("search", [False, True], ids=["rounding", "skipping"])
def test_what_was_calibrated_on_is_not_read(tmp_path: Path, search: bool) -> None:
    """The text that weights are rounded for, or that limits are searched on."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"value_{number} = compute({number}) # {number * number}\n" for number in range(9000)))
    more = {"quant": "q8", "skip": 0.01, "skip_tokens": 30_000} if search else {"quant": "q4"}
    config = resolve(
        CompileOptions(calibration=(text,), checkpoint_bound=0.01, **more), load_model(BUNDLED_MODEL).facts
    )
    found = _held_out(BUNDLED_MODEL, None, config)
    assert found.source == f"the end of {text}"
    if search:
        learning, measuring, _ = _windows(BUNDLED_MODEL, config.text(config.skip_tokens + SENSITIVITY_TOKENS))
        read = [*learning, *measuring]
    else:
        read = [checkpoint_windows(BUNDLED_MODEL, config.text(config.rounding_tokens)).calibration.flatten().tolist()]
    decode = checkpoint_tokenizer(BUNDLED_MODEL, 4096).decode
    calibrated_on = {line for window in read for line in decode(window).split("\n")[1:-1]}
    assert len(calibrated_on) > 1000
    for window in found.windows:
        assert not calibrated_on.intersection(decode(window).split("\n")[1:-1])


def test_models_that_cannot_be_compared(tiny_model: Path, tmp_path: Path) -> None:
    options = CompileOptions(checkpoint_bound=0.01)
    with pytest.raises(UsageError, match="not with a module in memory"):
        compile_model(load_model(tiny_model), tmp_path / "artifact", options)
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in tiny_model.iterdir():
        if "token" not in path.name:
            (bare / path.name).symlink_to(path)
    with pytest.raises(UsageError, match=r"--checkpoint-bound reads text, and the model has no tokenizer.json"):
        compile_model(bare, tmp_path / "artifact", options)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]
    for bound in (-0.1, float("nan")):
        with pytest.raises(UsageError, match="checkpoint bound must be at least 0"):
            CompileOptions(checkpoint_bound=bound)
    # A text may be given to compare on, and for nothing else.
    assert CompileOptions(quant="q8", checkpoint_bound=0.01, calibration=(Path("text"),)).calibration == (Path("text"),)
    with pytest.raises(UsageError, match="needs none"):
        CompileOptions(quant="q8", calibration=(Path("text"),))


@pytest.mark.slow("profiles, trains and compiles a model")
def test_recall_and_thresholds_are_by_the_measure_of_the_profile(tmp_path: Path) -> None:
    """Half of the rows of down are a hundredth as long as the others: by contribution few of these neurons fire."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    save_tiny_llama(model, hidden_act="silu", num_hidden_layers=1)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:, ::2] *= 0.01
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    text.write_text(" ".join(f"value {n} = {n * n % 97}" for n in range(400)))
    profiling = ProfileOptions((text,), tokens=1500, samples=1500, window=64, accuracy_bound=0.001, by="contribution")
    profile = profile_model(model, tmp_path / "profile", profiling)
    options = {
        "predictor": "learned",
        "profile": profile.folder,
        "accuracy_bound": math.inf,
        "check_tokens": 256,
        "context": 64,
    }
    lines = _compared(tmp_path / "artifact", model, checkpoint_bound=1.0, **options)["lines"]
    (layer,) = json.loads((tmp_path / "artifact" / "report.json").read_text())["accuracy"]["layers"]
    assert layer["firing_share"] == pytest.approx(profile.layers[0].firing_share, abs=0.1)
    # By magnitude, at this threshold, as many of the short rows' neurons would fire as of the long ones'.
    assert layer["firing_share"] < 0.5
    assert "thresholds" in [line["title"] for line in lines]
