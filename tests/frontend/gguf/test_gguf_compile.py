"""GGUF files compiled as models: their bytes come through without a second rounding, and their tokens too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import picompile_runtime
from helpers.gguf_files import POWERINFER_EXAMPLES, build, save_example
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.frontend.hf import open_checkpoint
from picompile_passes.dialect import dequantize_rows

_TYPES = {"f16": "F16", "q4": "Q4_0"}


def _save_folder(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder, in float32."""
    checkpoint = open_checkpoint(file)
    model = build(POWERINFER_EXAMPLES["llama"])
    model.load_state_dict({name: checkpoint.weights.load(name).float() for name in checkpoint.weights.names()})
    model.save_pretrained(folder)


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("format_name", ["f16", "q4"])
def test_a_powerinfer_file_is_the_artifact_of_the_folder(tmp_path: Path, format_name: str) -> None:
    file = save_example(tmp_path, "llama", _TYPES[format_name], powerinfer=True)
    _save_folder(file, tmp_path / "folder")
    options = CompileOptions(quant=format_name, context=64, predictor="exact")
    tokens = []
    for model, artifact in ((file, tmp_path / "a"), (tmp_path / "folder", tmp_path / "b")):
        compile_model(model, artifact, options)
        with picompile_runtime.load(artifact, threads=1) as engine:
            found = [int(engine.prefill([3, 5, 7]).argmax())]
            while len(found) < 20:
                found.append(int(engine.decode(found[-1]).argmax()))
            tokens.append(found)
    whole, other = (load_file(tmp_path / name / "weights.safetensors") for name in "ab")
    assert whole.keys() == other.keys()
    for name, tensor in whole.items():
        if format_name == "f16" or name not in ("lm_head.weight", "model.embed_tokens.weight"):
            assert torch.equal(tensor, other[name]), name
            continue
        # The folder's are rounded to the format of heads; the file's stay in the format that it has them in.
        values = open_checkpoint(tmp_path / "folder").weights.load(name).float()
        assert torch.equal(dequantize_rows(tensor, "q4", values.shape[1]), values)
    if format_name == "f16":
        assert tokens[0] == tokens[1]
