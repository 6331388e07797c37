"""`picompile import-predictors`, with files as PowerInfer writes them."""

import json
from pathlib import Path

import pytest

from helpers.powerinfer_files import Sizes, random_predictors, write_activations, write_gguf
from helpers.refusals import assert_refused
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
    assert again.code == 2 and "give --overwrite to overwrite it" in again.err
    write_gguf(tmp_path / "a.powerinfer.gguf", random_predictors(SIZES, 22), threshold=2.0)
    write_activations(tmp_path / "activation", [torch.arange(200), torch.arange(200)])
    forced = cli("import-predictors", tmp_path, "--model", tiny_model, "-o", output, "--overwrite")
    assert forced.code == 0 and forced.out.splitlines()[1].startswith(f"{output / 'layers'}: how often each neuron")
    facts = json.loads((output / "predictors.json").read_text())
    assert [layer["threshold"] for layer in facts["layers"]] == pytest.approx([2.0, 2.0], abs=1e-6)


def test_bad_input(cli: Cli, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("a.gguf")
    write_gguf(file, random_predictors(SIZES, 23))
    whole = file.read_bytes()
    model, output = ("--model", tiny_model), ("-o", "out")
    for content, words, says in (
        (whole[:100], (file, *model, *output), "error: a.gguf: cut or forged"),
        (whole[:-3000], (file, *model, *output), "error: a.gguf: cut: its tensors need"),
        (b"", (file, *model, *output), "error: a.gguf: 0 bytes are no GGUF file"),
        (whole, ("nothing", *model, *output), "nothing: no such file or folder"),
        (whole, (file, "--model", "nothing", *output), "nothing: no such file or folder; MODEL is"),
        (whole, (file, *model, "-o", file), "a.gguf: exists and is not a folder"),
        (whole, (file, *model), "Missing option"),
    ):
        file.write_bytes(content)
        assert_refused(cli("import-predictors", *words), 2, says)
        assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
