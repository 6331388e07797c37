"""A GGUF file as a weight source."""

from pathlib import Path

import pytest
import torch

from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, build, write_example
from picompile.frontend.gguf import GgufWeights, open_gguf
from picompile_passes.dialect.formats import dequantize_rows


@pytest.mark.parametrize(("type_name", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16"), ("Q4_0", "f32")])
def test_names_are_those_of_the_model(tmp_path: Path, type_name: str, dtype: str) -> None:
    # PowerInfer left llama.cpp before there was BF16.
    example = (EXAMPLES if type_name == "BF16" else POWERINFER_EXAMPLES)["llama"]
    write_example(tmp_path / "model.gguf", example, build(example), type_name)
    opened = open_gguf(tmp_path / "model.gguf")
    weights = GgufWeights(opened, {"down": "model.layers.1.mlp.down_proj.weight", "norm": "model.norm.weight"})
    assert list(weights.names()) == ["down", "norm"]
    assert weights.shape("down") == (96, 160) and weights.dtype == dtype
    assert torch.equal(weights.load("down"), opened.load("model.layers.1.mlp.down_proj.weight"))
    packed = weights.packed("down", "q4", transposed=True)
    assert (packed is not None) == (type_name == "Q4_0")
    if packed is not None:
        assert torch.equal(dequantize_rows(packed, "q4", 96), weights.load("down").T)
    weights.close()
    with pytest.raises(KeyError):
        weights.shape("up")


@pytest.mark.parametrize(
    ("stored", "quant", "said"),
    [("Q4_1", "q4", True), ("Q5_1", "q4", True), ("Q4_1", "q8", False), ("Q4_0", "q4", False), ("F16", "q4", False)],
)
def test_what_is_rounded_a_second_time(tmp_path: Path, stored: str, quant: str, said: bool) -> None:
    write_example(tmp_path / "model.gguf", EXAMPLES["llama"], build(EXAMPLES["llama"]), stored)
    opened = open_gguf(tmp_path / "model.gguf")
    weights = GgufWeights(opened, {name: name for name in opened.tensors})
    assert weights.rounds_again(quant) == (stored if said else None)
