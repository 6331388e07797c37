"""Commands that take a model, with a GGUF file as their model."""

import json
import random
from pathlib import Path

import pytest

from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, build, byte_level_metadata, write_example
from helpers.powerinfer_files import Sizes, random_predictors
from helpers.refusals import assert_refused
from helpers.support import BuildOnce, Cli

# Those of the example.
SIZES = Sizes(hidden=96, neurons=160, ranks=(32, 64))


@pytest.fixture(scope="session")
def powerinfer_file(build_once: BuildOnce) -> Path:
    """A Llama with ReLU in PowerInfer's format, with predictors. Tests must not change it."""

    def make(folder: Path) -> None:
        folder.mkdir()
        tensors = {
            f"blk.{layer}.{part}.weight": values
            for layer, parts in enumerate(random_predictors(SIZES, 5))
            for part, values in zip(("fc1", "fc2"), parts, strict=True)
        }
        example = POWERINFER_EXAMPLES["llama"]
        more = byte_level_metadata() | {"powerinfer.sparse_threshold": 0.5, "tensors": tensors}
        write_example(folder / "model.powerinfer.gguf", example, build(example), "F16", **more)

    return build_once("cli-powerinfer-file", make) / "model.powerinfer.gguf"


@pytest.fixture(scope="session")
def text(build_once: BuildOnce) -> Path:
    def make(folder: Path) -> None:
        folder.mkdir()
        words = ["neuron", "gate", "up", "down", "hot", "cold"]
        (folder / "text.txt").write_text(" ".join(random.choices(words, k=4000)))

    return build_once("cli-gguf-text", make) / "text.txt"


@pytest.mark.slow("compiles a GGUF file")
def test_compile_takes_the_predictors_of_the_file(cli: Cli, tmp_path: Path, powerinfer_file: Path, text: Path) -> None:
    ended = cli("import-predictors", powerinfer_file, "--model", powerinfer_file, "-o", tmp_path / "predictors")
    assert (ended.code, ended.err) == (0, "")
    # A profile would cost minutes for a model that brings its predictors.
    options = ["--predictor", "learned", "--accuracy-bound", "off", "--quant", "f16", "--check-tokens", 64]
    artifacts = tmp_path / "own", tmp_path / "imported"
    for artifact, given in zip(artifacts, ([], ["--predictors", tmp_path / "predictors"]), strict=True):
        ended = cli("compile", powerinfer_file, "-o", artifact, *options, *given)
        assert ended.code == 0, ended.err
        assert "profile" not in ended.err
    weights = [(artifact / "weights.safetensors").read_bytes() for artifact in artifacts]
    assert weights[0] == weights[1]
    shown = json.loads(cli("inspect", artifacts[0], "--json").out)
    assert shown["predictor"] == "learned-relu"


@pytest.mark.slow("compiles a GGUF file")
def test_every_command_takes_a_file(cli: Cli, tmp_path: Path, powerinfer_file: Path, text: Path) -> None:
    """Profile, train with the profile, plan with both, compile with both, measure and run."""
    profile, predictors, plan, artifact = (tmp_path / name for name in ("profile", "predictors", "plan", "artifact"))
    unchecked = ["--accuracy-bound", "off", "--check-tokens", 64]
    for command in (
        ["profile", powerinfer_file, "-o", profile, "--calibration", text, "--tokens", 2048, "--window", 64],
        ["train", powerinfer_file, "--profile", profile, "-o", predictors, "--accuracy-bound", "off", "--jobs", 1],
        ["plan", powerinfer_file, "--profile", profile, "--predictors", predictors, "--target", "4090", "-o", plan],
        ["compile", powerinfer_file, "-o", artifact, "--predictor", "learned", "--predictors", predictors, *unchecked],
        ["eval", artifact, "--against", powerinfer_file, "--text", text],
        ["run", artifact, "-p", "neuron gate", "-n", 4],
    ):
        ended = cli(*command)
        assert ended.code == 0, (command, ended.err)


@pytest.mark.slow("compiles a GGUF file")
@pytest.mark.parametrize(("form", "quant", "says"), [("Q8_0", "q8", ""), ("Q4_1", "q4", "rounds a second time")])
def test_llama_cpp_file(cli: Cli, tmp_path: Path, form: str, quant: str, says: str) -> None:
    write_example(tmp_path / "a.gguf", EXAMPLES["llama"], build(EXAMPLES["llama"]), form, **byte_level_metadata())
    ended = cli("compile", tmp_path / "a.gguf", "-o", tmp_path / "artifact", "--quant", quant, "--predictor", "none")
    assert ended.code == 0 and says in ended.err, ended.err
    assert cli("run", tmp_path / "artifact", "-p", "neuron", "-n", 4).code == 0


def test_what_is_no_model(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "b.gguf"
    file.write_bytes(b"GGML" + bytes(100))
    for command, model, says in (
        ("compile", tmp_path, f"{file}: neither a folder nor a GGUF file"),
        ("compile", file, "neither a folder nor a GGUF file"),
        ("profile", file, "neither a folder nor a GGUF file"),
    ):
        assert_refused(cli(command, model, "-o", tmp_path / "out"), 2, says)
    for name in ("a", "c"):
        file.with_name(f"{name}.gguf").write_bytes(b"GGUF")
    assert_refused(
        cli("compile", tmp_path, "-o", tmp_path / "out"),
        2,
        "several GGUF files are in it; name one of a.gguf, b.gguf, c",
    )
    for each in tmp_path.glob("*.gguf"):
        each.unlink()
    assert_refused(
        cli("compile", tmp_path, "-o", tmp_path / "out"), 2, "no config.json in it; MODEL is a Hugging Face folder"
    )
