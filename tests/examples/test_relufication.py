"""examples/relufy.py on a small model with random weights: what it trains, keeps, writes and refuses."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from helpers.families import build, save
from helpers.reference import eager_logits, relative_error
from helpers.support import ROOT, Cli, save_tiny_llama

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import relufy  # noqa: E402
from relufication import training  # noqa: E402
from relufication.measure import count_firings, measure  # noqa: E402
from relufication.pair import open_pair  # noqa: E402

import picompile_runtime  # noqa: E402
from picompile.errors import UnsupportedModelError, UsageError  # noqa: E402
from picompile.predictors.profile.options import ProfileOptions  # noqa: E402
from picompile.predictors.profile.run import profile_model  # noqa: E402
from picompile.predictors.profile.text import CalibrationText  # noqa: E402

WINDOW = 32
SMALL: dict[str, Any] = {
    "threads": 1,
    "window": WINDOW,
    "tokens": 2048,
    "own_tokens": 0,
    "probe_tokens": 128,
    "solve_tokens": 512,
    "blocks": 0.4,
}


@pytest.fixture(autouse=True)
def _threads() -> Any:
    """Leave tests after these with as many threads as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def swiglu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "swiglu"
    save_tiny_llama(folder, hidden_act="silu")
    return folder


def train(model: Path, out: Path, steps: int = 10, **options: Any) -> dict[str, Any]:
    """Train a copy, and return its measurements."""
    relufy.main(model, out, steps=steps, **{"work": out.with_name(f"{out.name}-work"), **SMALL, **options})
    found: dict[str, Any] = json.loads((out / "relufication.json").read_text())
    return found


def eager(folder: Path, activation: str) -> nn.Module:
    """The model of a folder as transformers has it. Bamboo is Mistral with ReLU on the up projection too."""
    from transformers import LlamaForCausalLM, MistralForCausalLM

    kind = LlamaForCausalLM if activation == "relu" else MistralForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    if activation == "drelu":
        for layer in model.model.layers:
            layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj, nn.ReLU())
    return model


@pytest.mark.slow("trains a model; the steps of a training have fast tests")
def test_measurements_and_files(swiglu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "images" / "course.png"
    before = os.umask(0o022)
    try:
        found = train(swiglu, tmp_path / "copy", steps=30, image=image)
    finally:
        os.umask(before)
    # Others can read it.
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").iterdir()} == {0o644}
    stages = [record["stage"] for record in found["records"]]
    assert stages[:2] == ["swap", "solve"] and stages[-1] == "end"
    assert {"blocks", "model"} <= set(stages)
    assert found["records"][-1]["step"] == 30
    assert found["records"][-1]["tokens"] == 512 + 30 * 2 * WINDOW
    swap, solve, end = (found["records"][place]["text"]["library"]["kl"] for place in (0, 1, -1))
    assert swap > 2 * solve > 2 * end
    assert image.read_bytes()[:4] == b"\x89PNG"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "copy").iterdir()
    }
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["hidden_act"] == "relu" and config["architectures"] == ["LlamaForCausalLM"]
    assert "| end | 2,432 |" in capsys.readouterr().out


@pytest.mark.slow("trains a model; the steps of a training have fast tests")
def test_a_resumed_training_ends_with_the_same_bytes(
    swiglu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(swiglu, tmp_path / "whole", l1=0.01)
    take_step, steps_left = training.take_step, iter([False, False, True, False, False, False, True, *5 * [False]])

    def stopping(*arguments: Any) -> float:
        """A signal comes in the third step, which is block by block, and in the seventh, of the whole model."""
        if next(steps_left):
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*arguments)

    monkeypatch.setattr(training, "take_step", stopping)
    for resume in (False, True):
        with pytest.raises(typer.Exit) as stopped:
            train(swiglu, tmp_path / "parts", l1=0.01, resume=resume)
        assert stopped.value.exit_code == 128 + signal.SIGTERM
        assert not (tmp_path / "parts").exists()
    parts = train(swiglu, tmp_path / "parts", l1=0.01, resume=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    for record in (*whole["records"], *parts["records"]):
        del record["seconds"], record["cpu_seconds"]
    assert parts == whole
    # A finished training is only written again.
    again = train(swiglu, tmp_path / "parts", l1=0.01, resume=True)
    assert len(again["records"]) == len(whole["records"])


@pytest.mark.slow("trains and compiles a model")
@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_the_compiled_copy_equals_eager_transformers(activation: str, swiglu: Path, tmp_path: Path, cli: Cli) -> None:
    copy, artifact = tmp_path / "copy", tmp_path / "artifact"
    train(swiglu, copy, steps=2, activation=activation)
    done = cli("compile", copy, "-o", artifact, "--quant", "f16", "--predictor", "exact", "--context", 64)
    assert done.code == 0, done.err
    ids = list(range(40, 70))
    with picompile_runtime.load(artifact, threads=1) as engine:
        measured = torch.cat([torch.from_numpy(logits.copy()) for logits in engine.score(ids)])
        engine.decode(ids[-1])
        assert all(0 < block.fired_share < 0.7 for block in engine.firing())
    assert relative_error(measured, eager_logits(eager(copy, activation), ids)) < 2e-3


@pytest.mark.slow("trains, compiles and profiles a model")
@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_firing_is_what_a_profile_counts(activation: str, swiglu: Path, tmp_path: Path) -> None:
    train(swiglu, tmp_path / "copy", steps=2, activation=activation)
    text = CalibrationText("a text", (EXAMPLES / "relufy.py").read_text())
    options = ProfileOptions((text,), (text,), tokens=1024, samples=64, window=WINDOW, held_out_tokens=64)
    profile = profile_model(tmp_path / "copy", tmp_path / "profile", options)
    windows = torch.tensor(profile.calibration())
    counts = count_firings(eager(tmp_path / "copy", activation), windows)
    assert torch.equal(counts, torch.stack([profile.counts(layer) for layer in range(2)]))
    shares = [layer.firing_share for layer in profile.layers]
    pair = open_pair(swiglu, activation)
    pair.copy.load_state_dict(eager_weights(tmp_path / "copy"))
    assert measure(pair, windows)["firing"] == pytest.approx(shares, abs=1e-5)


def eager_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_models_that_are_refused(tmp_path: Path) -> None:
    for number, (change, activation, message) in enumerate(
        [
            ({"hidden_act": "relu"}, "relu", "activation is relu already"),
            ({"hidden_act": "gelu"}, "relu", "activation is gelu; only SiLU is replaced"),
            ({"mlp_bias": True, "hidden_act": "silu"}, "drelu", "not llama with mlp_bias"),
        ]
    ):
        save_tiny_llama(tmp_path / str(number), **change)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModelError, match=message):
            open_pair(tmp_path / str(number), activation)
    save("opt-galactica", build("opt-galactica"), tmp_path / "opt")
    with pytest.raises(UnsupportedModelError, match="has no feed-forward block with a gate"):
        open_pair(tmp_path / "opt", "relu")


def test_options_that_make_no_sense(swiglu: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
        ({"steps": 0}, "--steps or --minutes"),
        ({"window": 300}, "more than the model's 256 positions"),
        ({"tokens": 20}, "has no window"),
        ({"resume": True}, r"checkpoint\.pt: is not there, so nothing can be resumed"),
    ):
        with pytest.raises(UsageError, match=message):
            train(swiglu, tmp_path / "copy", **options)
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="exists and has no relufication"):
        train(swiglu, tmp_path)
    assert (tmp_path / "thesis.txt").exists()
