"""examples/relufy.py on a small model with random weights: what it trains, keeps, writes and refuses."""

import json
import os
import signal
import subprocess
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
from relufication import texts, training  # noqa: E402
from relufication.measure import count_firings, measure  # noqa: E402
from relufication.pair import decoder_layers, feed_forward_blocks, open_pair  # noqa: E402
from relufication.solving import check_added, solve_down  # noqa: E402
from relufication.texts import OWN_EVERY, Texts  # noqa: E402
from relufication.training import Recipe, contributions, learn_blocks  # noqa: E402

import picompile_runtime  # noqa: E402
from picompile.errors import UnsupportedModelError, UsageError  # noqa: E402
from picompile.predictors.profile import ProfileOptions, profile_model  # noqa: E402
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


@pytest.mark.slow("trains a model; the steps of a training have fast tests")
def test_a_checkpoint_of_another_training_is_refused(swiglu: Path, tmp_path: Path) -> None:
    train(swiglu, tmp_path / "copy", steps=1)
    before = {path: path.read_bytes() for path in (tmp_path / "copy-work").iterdir()}
    for changes, words in (
        ({"activation": "drelu"}, "--activation relu, not --activation drelu"),
        ({"l1": 0.5}, "--l1 0.0, not --l1 0.5"),
        ({"own_tokens": 64}, "--own-tokens 0, not --own-tokens 64"),
    ):
        with pytest.raises(UsageError, match=f"is of a training with {words}; give another --work"):
            train(swiglu, tmp_path / "copy", steps=2, **changes, resume=True)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in (tmp_path / "copy-work").iterdir()} == before


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


def test_one_copy_of_what_is_not_trained(swiglu: Path) -> None:
    pair = open_pair(swiglu, "relu")
    trained = pair.trained()
    assert len(trained) == 2 * 3 + 2 * 2 + 1
    for (name, one), (_, other) in zip(pair.original.named_parameters(), pair.copy.named_parameters(), strict=True):
        assert (one.data_ptr() == other.data_ptr()) == (name not in trained), name


def streams(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """The stream behind each layer."""
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in decoder_layers(model)]
    model(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def test_gradients_of_blocks_stay_in_them(swiglu: Path) -> None:
    """They are those of each block's own error, for the input that the copy's stream gives it."""
    pair = open_pair(swiglu, "relu")
    batch = torch.arange(2 * WINDOW).reshape(2, WINDOW)
    with torch.no_grad():
        wanted, reached = streams(pair.original, batch), streams(pair.copy, batch)
    loss = learn_blocks(pair, batch, l1=0.1)
    found = {name: parameter.grad for name, parameter in pair.trained().items()}
    assert {name for name, gradient in found.items() if gradient is None} == {name for name in found if "norm" in name}
    errors = []
    inputs: list[torch.Tensor] = []
    blocks = feed_forward_blocks(pair.copy)
    hooks = [block.register_forward_hook(lambda _, given, __: inputs.append(given[0])) for block in blocks]
    with torch.no_grad():
        pair.copy(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    for block, given, exact, after in zip(blocks, inputs, wanted, reached, strict=True):
        neurons = block.act_fn(block.gate_proj(given)) * block.up_proj(given)
        guess = block.down_proj(neurons)
        errors.append(training.relative_error(guess, guess.detach() + exact - after))
        penalty = contributions(neurons, guess, block.down_proj.weight)
        gradients = torch.autograd.grad(errors[-1] + 0.1 * penalty, list(block.parameters()))
        for parameter, gradient in zip(block.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    assert loss == pytest.approx(sum(error.item() for error in errors) / 2)


def test_least_squares_of_one_layer_is_that_of_numpy(swiglu: Path) -> None:
    """The last layer's weights, from the streams before and behind it."""
    pair, again = open_pair(swiglu, "relu"), open_pair(swiglu, "relu")
    batch = torch.arange(2 * WINDOW).reshape(2, WINDOW)
    solve_down(pair, [batch])
    first, block = feed_forward_blocks(again.copy)
    solved_first, solved = feed_forward_blocks(pair.copy)
    first.load_state_dict(solved_first.state_dict())
    seen: list[torch.Tensor] = []
    hook = block.down_proj.register_forward_hook(lambda _, given, out: seen.extend((given[0], out)))
    with torch.no_grad():
        after, exact = streams(again.copy, batch)[-1], streams(pair.original, batch)[-1]
    hook.remove()
    neurons, added = (part.flatten(0, 1).double() for part in seen)
    wanted = added + (exact - after).flatten(0, 1).double()
    start = block.down_proj.weight.detach().double()
    ridge = 0.1 * (neurons**2).sum(0).mean()
    rows = torch.cat([neurons, ridge.sqrt() * torch.eye(neurons.shape[1])])
    solution = torch.linalg.lstsq(rows, torch.cat([wanted, ridge.sqrt() * start.T])).solution.T
    torch.testing.assert_close(solved.down_proj.weight.double(), solution, rtol=1e-3, atol=1e-4)
    # The copy's stream is nearer to the original's behind both layers.
    with torch.no_grad():
        exacts, plain = streams(pair.original, batch), streams(open_pair(swiglu, "relu").copy, batch)
        errors = [list(map(training.relative_error, each, exacts)) for each in (plain, streams(pair.copy, batch))]
    assert all(new < old / 2 for old, new in zip(*errors, strict=True))


def test_the_penalty_is_not_lessened_by_scaling() -> None:
    neurons, down = torch.rand(5, 7), torch.rand(3, 7)
    before = contributions(neurons, neurons @ down.T, down)
    scales = torch.rand(7) + 0.1
    after = contributions(neurons * scales, neurons @ down.T, down / scales)
    torch.testing.assert_close(before, after)


def test_text_is_read_once_before_it_is_read_again() -> None:
    library, own = (torch.arange(start, start + 14)[:, None] for start in (0, 100))
    both = Texts(library, own, {}, seed=3)
    rows = torch.cat([both.batch(step, 2) for step in range(56)]).flatten().tolist()
    assert [row >= 100 for row in rows[:16]] == 2 * ([False] * (OWN_EVERY - 1) + [True])
    read = [row for row in rows if row < 100]
    assert sorted(read[:14]) == sorted(read[14:28]) == list(range(14)) and read[:14] != read[14:28]
    assert sorted(row for row in rows if row >= 100) == list(range(100, 114))


def test_learning_rates() -> None:
    recipe = Recipe(100, 0, 0.2, 0, 2, 0.0, 1e-3, 1e-4)
    assert recipe.stage(0.19) == "blocks" and recipe.stage(0.2) == "model"
    for stage, step, done, rate in (
        ("blocks", 0, 0.0, 1e-3 / 20),
        ("blocks", 50, 0.1, 1e-3 * (0.05 + 0.475)),
        ("model", 50, 0.2, 1e-4),
        ("model", 50, 1.0, 5e-6),
    ):
        assert recipe.learning_rate_at(stage, step, done) == pytest.approx(rate)
    assert recipe.progress(50, 1e9) == 0.5


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


def test_blocks_whose_output_is_normed_cannot_learn_alone(tmp_path: Path) -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    save_tiny_llama(tmp_path)
    Olmo2ForCausalLM(Olmo2Config(vocab_size=300, hidden_act="silu", **sizes)).save_pretrained(tmp_path)
    pair = open_pair(tmp_path, "relu")
    with pytest.raises(UnsupportedModelError, match=r"Olmo2ForCausalLM.* give --solve-tokens 0 --blocks 0"):
        check_added(pair, torch.arange(WINDOW)[None])


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


@pytest.mark.slow("trains a model; the steps of a training have fast tests")
def test_text_of_the_models_own(swiglu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    own_windows = texts.own_windows
    monkeypatch.setattr(
        texts, "own_windows", lambda *given: (asked.append(os.environ.get("PICOMPILE_THREADS")), own_windows(*given))[1]
    )
    found = train(swiglu, tmp_path / "copy", own_tokens=1024)
    assert found["records"][0]["text"]["own"]["tokens"] >= 3 * WINDOW
    own = tmp_path / "copy-work" / "own.safetensors"
    before = own.stat().st_mtime_ns
    train(swiglu, tmp_path / "copy", own_tokens=1024)
    assert own.stat().st_mtime_ns == before
    assert asked == ["1"] and "PICOMPILE_THREADS" not in os.environ


@pytest.mark.slow("starts a training in a process")
def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    command = [sys.executable, str(EXAMPLES / "relufy.py"), str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--steps", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == f"error: {tmp_path / 'model'}: its activation is relu already; compile it as it is\n"
