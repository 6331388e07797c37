"""`picompile train`: its output, and what it refuses in one line before any work."""

import json
import random
import shutil
from pathlib import Path

import pytest
from torch.fx import GraphModule

from helpers.refusals import assert_refused
from helpers.support import BuildOnce, Cli, save_tiny_llama
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import FFN

FAST = ("--recall", "90%", "--budget", "100%", "--accuracy-bound", "off", "--no-exact", "--rank", "8", "--jobs", "1")


@pytest.fixture(scope="module")
def profile(build_once: BuildOnce, tiny_model: Path) -> Path:
    from picompile.predictors.profile.options import ProfileOptions
    from picompile.predictors.profile.run import profile_model
    from picompile.predictors.profile.text import CalibrationText

    text = CalibrationText("words", " ".join(random.choices(["up", "down", "gate", "and", "mask"], k=1500)))
    options = ProfileOptions((text,), tokens=1200, samples=600, window=64, held_out_tokens=256)
    return build_once("cli-train-profile", lambda folder: profile_model(tiny_model, folder, options) and None)


def test_train_prints_a_summary(cli: Cli, tiny_model: Path, profile: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "predictors"
    ended = cli("train", tiny_model, "--profile", profile, "-o", output, *FAST)
    assert (ended.code, ended.err) == (0, "")
    parameters = 2 * (8 * (96 + 200) + 200)
    assert f"{output}: {parameters} parameters" in ended.out
    assert "perplexity" in ended.out
    assert ended.out.count("rank 8 of ") == 2
    shown = cli("train", tiny_model, "--profile", profile, "-o", output, *FAST, "--json")
    made = json.loads(shown.out)
    assert made == json.loads((output / "predictors.json").read_text()) and made["accuracy"]["bound"] is None


def test_a_missed_accuracy_bound_ends_with_seven(
    cli: Cli, tiny_model: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(graph_module: GraphModule, *given: object) -> float:
        return 10.0 if any(calls(graph_module.graph, FFN)) else 10.25

    # Random weights may do better with neurons left out.
    monkeypatch.setattr("picompile.predictors.train.run.streamed_perplexity", worse)
    wanted = (
        "--recall",
        "50%",
        "--budget",
        "100%",
        "--accuracy-bound",
        "2%",
        "--no-exact",
        "--rank",
        "2",
        "--jobs",
        "1",
    )
    ended = cli("train", tiny_model, "--profile", profile, "-o", tmp_path / "p", *wanted)
    assert ended.code == 7
    assert ended.err.splitlines()[-1].startswith("error: with predictors the perplexity rises by 2.500%, more than 2.0")
    assert "layers " in ended.err and not (tmp_path / "p" / "predictors.json").exists()


def test_options_are_checked(cli: Cli, tiny_model: Path, profile: Path, tmp_path: Path) -> None:
    for words in (
        *(
            "--accuracy-bound much",
            "--budget 0",
            "--budget 700%",
            "--recall x",
            "--input sideways",
            "--rank 0",
            "--jobs 0",
        ),
        *("--device abacus", "--computed 0.5", "--seed -1"),
    ):
        option, value = words.split()
        assert_refused(cli("train", tiny_model, "--profile", profile, "-o", tmp_path / "p", option, value), 2, option)
        assert not (tmp_path / "p").exists()


def test_other_folders_are_refused(cli: Cli, tiny_model: Path, profile: Path, tmp_path: Path) -> None:
    other, cut, letters = (tmp_path / name for name in ("other", "cut", "letters"))
    save_tiny_llama(other, hidden_size=64)
    shutil.copytree(profile, cut)
    (cut / "layers" / "001.safetensors").write_bytes((profile / "layers" / "001.safetensors").read_bytes()[:500])
    letters.mkdir()
    (letters / "letter.txt").write_text("dear")
    for model, of, output, says in (
        (other, profile, tmp_path / "p", "another model"),
        (tiny_model, cut, tmp_path / "p", "001.safetensors"),
        (tiny_model, tmp_path / "nothing", tmp_path / "p", "no such folder"),
        (tiny_model, tiny_model, tmp_path / "p", "no profile"),
        (tmp_path / "nothing", profile, tmp_path / "p", "no such file or folder"),
        (tiny_model, profile, letters, "letters"),
    ):
        assert_refused(cli("train", model, "--profile", of, "-o", output), 2, says)
    assert not (tmp_path / "p").exists()
