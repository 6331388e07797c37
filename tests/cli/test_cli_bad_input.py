"""Bad input: one clear line, the documented exit code, and nothing half-written."""

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.refusals import assert_refused
from helpers.support import Cli, save_byte_tokenizer
from picompile_runtime.artifact.manifest import sealed

Usage = namedtuple("Usage", "total used free")
LOWERS = pytest.mark.slow("lowers a model before it reads this")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoiled."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def assert_nothing_left(folder: Path, *kept: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


# ------------------------------------------------------------------------------------------------------------- models


def cut(folder: Path, size: int) -> None:
    os.truncate(weights_of(folder), size)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(weights_of(folder))
    change(tensors)
    save_file(tensors, weights_of(folder))


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changes)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


SPOILED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "half of the weights": (lambda model: cut(model, weights_of(model).stat().st_size // 2), ("model.safetensors",)),
    "a part of the header": (lambda model: cut(model, 100), ("model.safetensors",)),
    "only pickles": (lambda model: weights_of(model).rename(model / "pytorch_model.bin"), ("safetensors",)),
    "no weights": (lambda model: weights_of(model).unlink(), ("safetensors",)),
    "broken config": (text("config.json", '{"model_type": "llama",'), ("config.json",)),
    "broken tokenizer": (text("tokenizer.json", '{"version": "1.0"'), ("tokenizer",)),
    "larger tokenizer": (lambda model: save_byte_tokenizer(model, vocabulary=400), ("tokenizer", "300")),
    "unknown architecture": (config(model_type="nosuch", architectures=["NoSuchForCausalLM"]), ("NoSuch",)),
    "unsupported activation": (config(hidden_act="mish"), ("mish",)),
    "a norm of NaN": (
        lambda model: change_tensors(model, lambda found: found["model.norm.weight"].fill_(float("nan"))),
        ("model.norm.weight", "NaN"),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=LOWERS if each == "a norm of NaN" else ()) for each in SPOILED]
)
def test_models_that_cannot_be_compiled(cli: Cli, model: Path, tmp_path: Path, name: str) -> None:
    spoil, says = SPOILED[name]
    spoil(model)
    ended = cli("compile", model, "-o", tmp_path / "out" / "artifact")
    assert_refused(ended, 3, *says)
    assert_nothing_left(tmp_path, "model")


@pytest.mark.slow("profiles, trains and compiles a model")
def test_fields_without_effect_are_named_once(cli: Cli, model: Path, tmp_path: Path) -> None:
    """A compilation that profiles and trains reads the checkpoint in each."""
    change_config(model, qk_layernorm=True, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    ended = cli("compile", model, "-o", tmp_path / "artifact", "--quant", "f16", "--context", "16")
    assert ended.code == 0
    named = "neither transformers nor picompile knows qk_layernorm; auto_map names code in the checkpoint"
    assert ended.err.count(named) == 1
    assert ended.err.count("\n") == 1
    planned = cli("plan", model, "--firing", "opt", "--target", "cpu")
    assert (planned.code, planned.err.count(named), planned.err.count("\n")) == (0, 1, 1)


@pytest.mark.slow("compiles a model per file", but=("tokenizer.json",))
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("generation_config.json", '{"eos_token_id": [257.0]}', "must be a token id"),
        ("tokenizer_config.json", '{"bos_token": "<s>"', "not readable as JSON"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
        ("tokenizer.json", "[1]", "is no tokenizer"),
        # As in a cache whose other half was deleted: the artifact had no tokenizer, and nobody said so.
        *((name, "", "a link to nowhere") for name in ("tokenizer.json", "generation_config.json")),
    ],
)
def test_files_that_would_keep_an_artifact_from_loading(
    cli: Cli, model: Path, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (model / name).unlink(missing_ok=True)
    if text:
        (model / name).write_text(text)
    else:
        (model / name).symlink_to(tmp_path / "nowhere")
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact"), 3, name, says)
    assert_nothing_left(tmp_path, "model")


def test_options_that_a_model_cannot_have(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before anything is compiled."""
    monkeypatch.setattr("picompile.compile.compile_model", None)
    (tmp_path / "empty").mkdir()
    for name in ("missing", "model/config.json", "empty"):
        assert_refused(cli("compile", tmp_path / name, "-o", tmp_path / "artifact"), 2, name)
    for words, says in (
        (("--context", "257"), "257 tokens is more than the model's 256"),
        (("--sequences", "0"), "--sequences"),
        (("--sequences", "257"), "--sequences"),
    ):
        assert_refused(cli("compile", model, "-o", tmp_path / "artifact", *words), 2, says)
    monkeypatch.undo()
    assert_refused(cli("compile", model, "-o", tmp_path / "artifact", "--pass", "no-such-pass"), 2, "no-such-pass")
    assert_nothing_left(tmp_path, "model", "empty")


def test_a_cache_that_kernels_cannot_count(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.config._MOST_ELEMENTS", 20_000)
    ended = cli("compile", model, "-o", tmp_path / "artifact", "--context", "32", "--sequences", "16")
    assert_refused(ended, 2, "16 sequences of 32 tokens", "20,000")
    assert_nothing_left(tmp_path, "model")


def test_wrong_hot_files_are_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    hot = tmp_path / "hot.json"
    for content, says in (
        ("[1, 2", "not JSON"),
        ("[1, 2]", "object"),
        ('{"a": [1]}', "'a'"),
        ('{"0": 5}', "layer 0"),
        ('{"0": [-1]}', "layer 0"),
        ('{"0": [true]}', "layer 0"),
        ('{"0": [5, 5]}', "twice"),
        (f'{{"0": [{"9" * 5000}]}}', ""),
        (f'{{"{"9" * 5000}": [1]}}', ""),
        ('{"0": [200]}', "200"),
        ('{"2": [0]}', "2"),
    ):
        hot.write_text(content)
        assert_refused(cli("compile", model, "-o", tmp_path / "artifact", "--hot", hot), 2, says)
        assert_nothing_left(tmp_path, "model", "hot.json")


# ------------------------------------------------------------------------------------------------------------- outputs


def test_output_that_is_in_the_way(cli: Cli, model: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    output, artifact = tmp_path / "out", Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    output.mkdir()
    (output / "diary.txt").write_text("dear diary")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    compile_, synth = ("compile", model), ("synth", "--shape", "tiny-reglu")
    for words, place, *says in (
        (compile_, output, "out", "choose another"),
        ((*compile_, "--overwrite"), output, "out", "choose another"),
        (synth, output, "out", "choose another"),
        ((*compile_, "--overwrite"), tmp_path / "link", "link"),
        (compile_, artifact, "--overwrite"),
        (compile_, tmp_path / "file" / "artifact", "file"),
        # /proc refuses even root, which these tests may run as.
        (compile_, "/proc/artifact", "/proc"),
        (synth, "/proc/model", "/proc"),
    ):
        assert_refused(cli(*words, "-o", place), 2, *says)
    assert (output / "diary.txt").read_text() == "dear diary"
    assert (artifact / "manifest.json").read_bytes() == (tiny_artifact / "manifest.json").read_bytes()
    assert_nothing_left(tmp_path, "model", "out", "artifact", "link", "file")


def test_a_disk_that_is_too_small(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000, 9_000, 1_000))
    assert_refused(cli("compile", model, "-o", tmp_path / "out" / "artifact"), 5, "0.0 MiB are free")
    assert_refused(cli("synth", "--shape", "tiny-reglu", "-o", tmp_path / "out" / "model"), 5, "disk")
    # Enough for the packed weights, which the command line estimates; too little for the whole artifact.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 0, 1_000_000))
    assert_refused(cli("compile", model, "-o", tmp_path / "out" / "artifact"), 5)
    assert_nothing_left(tmp_path, "model")


# ----------------------------------------------------------------------------------------------------------- artifacts


@pytest.mark.parametrize("digits", [19, 5000])
def test_numbers_of_many_digits(digits: int, cli: Cli, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads none of more than 4,300."""
    number = "9" * digits
    assert_refused(cli("run", tiny_artifact, "--ids", f"1,{number}"), 2, "--ids takes numbers")
    monkeypatch.setenv("PICOMPILE_THREADS", number)
    assert_refused(cli("run", tiny_artifact, "--ids", "1"), 2, "PICOMPILE_THREADS must be a number from 1 to 256")


def test_lengths_beyond_the_context(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    assert_refused(cli("run", tiny_artifact, "-p", "x" * 64), 2, "65", "64")
    assert_refused(cli("run", tiny_artifact, "--ids", "1,300"), 2, "299")
    assert_refused(cli("bench", tiny_artifact, "-p", "60", "-n", "5"), 2, "64")
    assert_refused(cli("bench", tiny_artifact, "-p", "64"), 2, "64")
    assert_refused(cli("bench", tiny_artifact, "-p", "8", "-n", "5", "-d", "60"), 2, "64", "60")
    assert_refused(cli("bench", tiny_artifact, "-d", "64"), 2, "64")
    (tmp_path / "empty.txt").write_text("")
    assert_refused(cli("eval", tiny_artifact, "--text", tmp_path / "empty.txt"), 2, "2 tokens")


def test_comparing_with_another_model(cli: Cli, tiny_artifact: Path, model: Path, tmp_path: Path) -> None:
    from helpers.support import save_tiny_llama

    other = tmp_path / "other"
    save_tiny_llama(other, vocab_size=310)
    (tmp_path / "text").write_text("hello")
    ended = cli("eval", tiny_artifact, "--text", tmp_path / "text", "--against", other)
    assert_refused(ended, 2, "310", "300")
    assert_refused(cli("eval", tiny_artifact, "--text", tmp_path / "text", "--against", tmp_path / "no"), 2, "no")


READING = [["run", "-p", "x"], ["inspect"], ["verify"], ["bench"]]


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_lost_files_are_missed(cli: Cli, tiny_artifact: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(cli(command[0], tmp_path / "missing", *command[1:]), 2, "missing", "no such file or folder")
    assert_refused(cli(command[0], tmp_path / "empty", *command[1:]), 4, "empty")
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    for name in ("weights.safetensors", "program.json"):
        content = (artifact / name).read_bytes()
        (artifact / name).unlink()
        assert_refused(cli(command[0], artifact, *command[1:]), 4, name)
        (artifact / name).write_bytes(content)


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_changed_byte_is_found(cli: Cli, tiny_artifact: Path, tmp_path: Path, command: str) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    for name in ("kernels/host.so", "weights.safetensors", "program.json", "tokenizer.json"):
        content = (artifact / name).read_bytes()
        place = len(content) // 2
        (artifact / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert_refused(cli(command, artifact, *(["-p", "x"] if command == "run" else [])), 4, name)
        (artifact / name).write_bytes(content)


def test_another_machine(cli: Cli, tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    manifest = json.loads((artifact / "manifest.json").read_text())
    for variant in manifest["code"]:
        variant["features"].append("nosuchfeature")
    (artifact / "manifest.json").write_bytes(sealed(manifest))
    assert_refused(cli("run", artifact, "-p", "x"), 6, "nosuchfeature")
    assert cli("inspect", artifact).code == 0
    assert cli("verify", artifact).code == 0
