"""`--activation`: every command that takes it reads the model whose config.json says so."""

import json
import random
from pathlib import Path

import pytest
import torch

from helpers.powerinfer_files import Sizes, random_predictors, write_gguf
from helpers.refusals import assert_refused
from helpers.support import BuildOnce, Cli, save_tiny_llama
from picompile.frontend.checkpoint import fingerprint
from picompile.predictors.profile.prepare import own_windows
from picompile.predictors.profile.windows import held_out_windows
from picompile.progress import NoProgress

FAST = ("--recall", "90%", "--budget", "100%", "--accuracy-bound", "off", "--no-exact", "--rank", "8", "--jobs", "1")
# The kernels of `tiny_artifact`.
SMALL = ("--quant", "f16", "--context", "64", "--accuracy-bound", "off", "--check-tokens", "64")
RELU = ("--activation", "relu")
ANOTHER = "profile of another model"


@pytest.fixture(scope="module")
def silu_model(build_once: BuildOnce) -> Path:
    """`tiny_model`, whose weights are of ReLU, with silu in its config.json. Tests must not change it."""
    return build_once("silu-model", lambda folder: save_tiny_llama(folder, hidden_act="silu"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(["up", "down", "gate", "and", "mask"], k=450)))
    return path


def _activation(cli: Cli, artifact: Path) -> str:
    ended = cli("inspect", artifact, "--json")
    assert (ended.code, ended.err) == (0, "")
    activation: str = json.loads(ended.out)["model"]["activation"]
    return activation


@pytest.mark.slow("runs several commands on a whole model")
def test_the_artifact_is_that_of_the_config_that_says_so(
    cli: Cli, silu_model: Path, tiny_artifact: Path, text: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    ended = cli("compile", silu_model, "-o", artifact, "--quant", "f16", "--context", "64", *RELU)
    assert (ended.code, ended.err) == (0, "")
    for name in ("program.json", "weights.safetensors"):
        assert (artifact / name).read_bytes() == (tiny_artifact / name).read_bytes()
    assert _activation(cli, artifact) == "relu"
    words = ("eval", artifact, "--text", text, "-n", "60", "--json", "--against", silu_model)
    asked, said = (cli(*words, *more) for more in (RELU, ()))
    changes = [abs(json.loads(ended.out)["relative_change"]) for ended in (asked, said)]
    assert changes[0] < 1e-3 < changes[1]
    assert "computes silu, the artifact relu: give the --activation" in said.err and "computes" not in asked.err


@pytest.mark.slow("runs several commands on a whole model")
def test_profile_train_and_compile(cli: Cli, silu_model: Path, text: Path, tmp_path: Path) -> None:
    profile, predictors = tmp_path / "profile", tmp_path / "predictors"
    words = ("--calibration", text, "--tokens", "1024", "--samples", "600", "--window", "64", "--json")
    ended = cli("profile", silu_model, "-o", profile, *words, *RELU)
    assert ended.code == 0, ended.err
    model = json.loads(ended.out)["model"]
    assert model["config"]["hidden_act"] == "relu"
    assert model["fingerprint"] == fingerprint(silu_model, "relu") != fingerprint(silu_model)

    train = ("train", silu_model, "--profile", profile, "-o", predictors, *FAST)
    refused = cli(*train)
    assert (refused.code, refused.err.count("\n")) == (2, 1) and ANOTHER in refused.err
    ended = cli(*train, *RELU)
    assert ended.code == 0, ended.err

    learned = ("compile", silu_model, "--predictor", "learned", *SMALL)
    given = ("--predictors", predictors, "--profile", profile)
    refused = cli(*learned, "-o", tmp_path / "none", *given)
    assert (refused.code, refused.err.count("\n")) == (2, 1) and "for another model" in refused.err
    ended = cli(*learned, "-o", tmp_path / "artifact", *given, *RELU)
    assert ended.code == 0, ended.err
    assert _activation(cli, tmp_path / "artifact") == "relu"


@pytest.mark.slow("runs several commands on a whole model")
def test_fingerprints_are_of_the_activation_that_was_asked_for(
    cli: Cli, silu_model: Path, text: Path, tmp_path: Path
) -> None:
    """That of the profile of a compilation, of a plan and of imported predictors."""
    work, learned = tmp_path / "work", ("--predictor", "sign", *SMALL)
    ended = cli("compile", silu_model, "-o", tmp_path / "a", *learned, "--calibration", text, "--work", work, *RELU)
    assert ended.code == 0, ended.err
    profile = json.loads((work / "profile" / "profile.json").read_text())
    # SiLU models have thresholds to search for; ReLU's are zero.
    assert profile["thresholds"] is None
    words = ("--firing", "10%", "--target", "4090", "--host-memory", "8GiB", "--json")
    plan = json.loads(cli("plan", silu_model, *words, *RELU).out)
    assert plan["predictor"] == "learned"
    assert json.loads(cli("plan", silu_model, *words).out)["predictor"] == "none"
    write_gguf(tmp_path / "a.gguf", random_predictors(Sizes(hidden=96, neurons=200, ranks=(32, 64)), 8))
    ended = cli("import-predictors", tmp_path / "a.gguf", "--model", silu_model, "-o", tmp_path / "made", *RELU)
    assert ended.code == 0, ended.err
    made = json.loads((tmp_path / "made" / "predictors.json").read_text())
    found = {profile["model"]["fingerprint"], plan["fingerprint"], made["model"]["fingerprint"]}
    assert found == {fingerprint(silu_model, "relu")}


@pytest.mark.slow("runs several commands on a whole model")
def test_text_of_the_models_own(silu_model: Path, tiny_model: Path, text: Path) -> None:
    found, expected = (
        own_windows(model, 96, 48, [[256]], 0, NoProgress(), activation)
        for model, activation in ((silu_model, "relu"), (tiny_model, None))
    )
    assert found.shape[0] >= 1 and torch.equal(found, expected)
    windows = (held_out_windows(model, (text,), 64, activation="relu")[0] for model in (silu_model, tiny_model))
    assert next(windows) == next(windows)


def test_an_unknown_name_is_refused_before_anything_is_read(cli: Cli) -> None:
    for command in (
        *("compile x -o y", "profile x -o y", "train x --profile z -o y", "plan x"),
        *("eval x --text z --against y", "import-predictors x --model z -o y"),
    ):
        assert_refused(cli(*command.split(), "--activation", "rleu"), 2, "unknown activation 'rleu'; known are gelu, ")


@pytest.mark.slow("needs an artifact and a profile for two refusals")
def test_commands_without_a_model_take_none(
    cli: Cli, tiny_artifact: Path, tiny_profile: Path, text: Path, tmp_path: Path
) -> None:
    for words, says in (
        (("plan", tiny_profile, "--target", "4090"), f"--activation: {tiny_profile} is a profile already"),
        (("eval", tiny_artifact, "--text", text), "--activation applies to the model of --against"),
    ):
        assert_refused(cli(*words, *RELU), 2, says)


def test_what_a_class_cannot_compute_ends_with_three(cli: Cli, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    ended = cli("compile", tmp_path / "model", "-o", tmp_path / "artifact", "--activation", "silu")
    assert_refused(ended, 3, "models of the family bamboo always compute relu")
    assert not (tmp_path / "artifact").exists()
