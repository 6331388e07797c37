"""The fingerprint of a model: the same for the same tensors, another for any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.checkpoint import fingerprint


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 3}')
    found = {"a": torch.randn(70, 90), "b": torch.randn(5), "c": torch.randn(3000).half()}
    save_file(found, tmp_path / "model.safetensors")
    return found


def test_the_same_tensors_in_other_files(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    before = fingerprint(tmp_path)
    assert len(before) == 64 and set(before) <= set("0123456789abcdef")
    (tmp_path / "config.json").write_text('{"hidden_size":3,\n "model_type": "llama"}')
    save_file(dict(reversed(tensors.items())), tmp_path / "model.safetensors", {"format": "pt"})
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").unlink()
    shards = {"x.safetensors": ["c", "a"], "another.safetensors": ["b"]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(tmp_path) == before
    assert fingerprint(Path(shutil.copytree(tmp_path, tmp_path.with_name("copy")))) == before


def test_any_other_model(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    def changed(name: str, tensor: Tensor) -> str:
        save_file(tensors | {name: tensor}, tmp_path / "model.safetensors")
        return fingerprint(tmp_path)

    found = {fingerprint(tmp_path)}
    for place in (0, -1):
        other = tensors["a"].clone()
        other.view(-1)[place] += 1
        found.add(changed("a", other))
    found.add(changed("a", tensors["a"].reshape(90, 70)))
    found.add(changed("c", tensors["c"].view(torch.bfloat16)))
    found.add(changed("d", torch.zeros(0)))
    found.add(changed("b", -tensors["b"]))
    save_file({**tensors, "a": tensors["b"], "b": tensors["a"]}, tmp_path / "model.safetensors")
    found.add(fingerprint(tmp_path))
    changed("a", tensors["a"])
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    found.add(fingerprint(tmp_path))
    assert len(found) == 9


def test_folders_that_are_no_models_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        fingerprint(tmp_path / "none")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not readable as JSON"):
        fingerprint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnsupportedModelError, match="truncated or damaged"):
        fingerprint(tmp_path)
