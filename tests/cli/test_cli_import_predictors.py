"""`picompile import-predictors`, with files as PowerInfer writes them."""

import importlib.util
import json
from pathlib import Path

import pytest

from helpers.powerinfer_files import Sizes, random_predictors, write_activations, write_gguf
from helpers.support import Cli

SIZES = Sizes(hidden=96, neurons=200, ranks=(32, 64))


def test_import_and_overwrite(cli: Cli, tmp_path: Path, tiny_model: Path) -> None:
    import torch

    write_gguf(tmp_path / "a.powerinfer.gguf", random_predictors(SIZES, 21))
    output = tmp_path / "new" / "out"
    ended = cli("import-predictors", tmp_path / "a.powerinfer.gguf", "--model", tiny_model, "-o", output)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"{output}: predictors of 2 layers, ranks 32 to 64, 28,816 parameters\n"
    again = cli("import-predictors", tmp_path / "a.powerinfer.gguf", "--model", tiny_model, "-o", output)
    assert again.code == 2 and "give --force to overwrite it" in again.err
    write_gguf(tmp_path / "a.powerinfer.gguf", random_predictors(SIZES, 22), threshold=2.0)
    write_activations(tmp_path / "activation", [torch.arange(200), torch.arange(200)])
    forced = cli("import-predictors", tmp_path, "--model", tiny_model, "-o", output, "--force")
    assert forced.code == 0 and forced.out.splitlines()[1].startswith(f"{output / 'layers'}: how often each neuron")
    facts = json.loads((output / "predictors.json").read_text())
    assert [layer["threshold"] for layer in facts["layers"]] == pytest.approx([2.0, 2.0], abs=1e-6)


@pytest.mark.parametrize(
    ("cut", "says"), [(100, "cut or forged"), (-3000, "cut: its tensors need"), (0, "0 bytes are no GGUF file")]
)
def test_cut_files(cli: Cli, tmp_path: Path, tiny_model: Path, cut: int, says: str) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file, random_predictors(SIZES, 23))
    file.write_bytes(file.read_bytes()[:cut])
    ended = cli("import-predictors", file, "--model", tiny_model, "-o", tmp_path / "new" / "out")
    assert ended.code == 2 and says in ended.err and ended.err.count("\n") == 1
    assert ended.err.startswith(f"error: {file}: ")
    assert not (tmp_path / "new").exists()


def test_without_the_gguf_package(cli: Cli, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "a.gguf", random_predictors(SIZES, 24))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))
    ended = cli("import-predictors", tmp_path / "a.gguf", "--model", tiny_model, "-o", tmp_path / "out")
    assert ended.code == 2
    assert ended.err == "error: GGUF files are read with the gguf package; install it: pip install 'picompile[gguf]'\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing", "--model", "MODEL", "-o", "out"], "nothing: no such file or folder"),
        (["a.gguf", "--model", "nothing", "-o", "out"], "nothing: no such file or folder; MODEL is"),
        (["a.gguf", "--model", "MODEL", "-o", "a.gguf"], "a.gguf: exists and is not a folder"),
        (["a.gguf", "--model", "MODEL"], "Missing option"),
    ],
)
def test_usage(
    cli: Cli, tmp_path: Path, tiny_model: Path, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"PWRI")
    ended = cli("import-predictors", *(str(tiny_model) if word == "MODEL" else word for word in arguments))
    assert ended.code == 2 and says in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
