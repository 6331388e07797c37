"""A compilation takes over the measure of the profile that its predictors are trained on."""

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.support import compile_for_test, save_tiny_llama
from picompile.predictors.profile import ProfileOptions, profile_model

pytestmark = pytest.mark.slow("profiles, trains and compiles a model")


def test_recall_and_thresholds_are_by_the_measure_of_the_profile(tmp_path: Path) -> None:
    """Half of the rows of down are a hundredth as long as the others: by contribution few of these neurons fire."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    save_tiny_llama(model, hidden_act="silu", num_hidden_layers=1)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:, ::2] *= 0.01
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    text.write_text(" ".join(f"value {n} = {n * n % 97}" for n in range(400)))
    profiling = ProfileOptions((text,), tokens=1500, samples=1500, window=64, gate=0.001, by="contribution")
    profile = profile_model(model, tmp_path / "profile", profiling)
    options = {"predictor": "learned", "profile": profile.folder, "gate": math.inf, "gate_tokens": 256, "context": 64}
    compile_for_test(model, tmp_path / "artifact", accuracy=1.0, **options)
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    (layer,) = report["accuracy"]["layers"]
    assert layer["firing_share"] == pytest.approx(profile.layers[0].firing_share, abs=0.1)
    # By magnitude, at this threshold, as many of the short rows' neurons would fire as of the long ones'.
    assert layer["firing_share"] < 0.5
    assert "thresholds" in [line["title"] for line in report["checkpoint_accuracy"]["lines"]]
