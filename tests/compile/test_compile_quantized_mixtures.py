"""Mixtures of quantized checkpoints, with tensors for each expert: their numbers are kept, and tokens are eager's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.greedy import first_difference
from helpers.quantized_files import Maker, Scheme
from helpers.quantized_mixtures import save_quantized_mixture
from helpers.quantized_numbers import KINDS
from helpers.support import compile_for_test
from picompile.errors import UnsupportedModelError
from picompile.frontend.hf import open_checkpoint

_EXPERT = "model.layers.0.mlp.experts.3.gate_proj"


def _scheme(**options: Any) -> tuple[Maker, Mapping[str, Any]]:
    scheme = Scheme(**options)
    return scheme.make, scheme.config


def _kind(name: str, **config: Any) -> tuple[Maker, Mapping[str, Any]]:
    return KINDS[name].make, {**KINDS[name].config, **config}


# What a checkpoint is made with, and the format that its matrices have in an artifact.
_KINDS: dict[str, tuple[tuple[Maker, Mapping[str, Any]], str]] = {
    "gptq": (_scheme(sym=True), "q4"),
    "gptq-zeros": (_scheme(), "q4m"),
    "gptq-8": (_scheme(bits=8, sym=True), "q8"),
    "awq": (_scheme(method="awq"), "q4m"),
    "fp8": (_kind("fp8-blocks", modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"]), "fp8"),
    "compressed-int": (_kind("packed-4"), "q4"),
    "compressed-float": (_kind("float-channel"), "fp8"),
    "nvfp4": (_kind("nvfp4"), "nvfp4"),
    "nf4": (_kind("nf4"), "nf4"),
    # Inputs of a group lie far from each other: no format has these numbers.
    "gptq-order": (_scheme(sym=True, desc_act=True), "q8"),
}


@pytest.mark.slow("compiles a model; the numbers of experts are those of the checkpoint in test_runs_of_experts.py")
@pytest.mark.parametrize("name", _KINDS)
def test_tokens_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    (make, config), form = _KINDS[name]
    model = save_quantized_mixture(tmp_path / "model", make, config)
    compile_for_test(tmp_path / "model", tmp_path / "artifact", context=64, chunk=16)
    formats = json.loads((tmp_path / "artifact" / "report.json").read_text())["weight_formats"]
    experts = {each for parameter, each in formats.items() if ".experts." in parameter}
    assert experts == {form}
    assert first_difference(model, tmp_path / "artifact") is None


@pytest.mark.slow("compiles a model")
def test_a_router_may_be_quantized(tmp_path: Path) -> None:
    """Old tools quantize it as any other linear."""
    make, config = _KINDS["awq"][0]
    model = save_quantized_mixture(tmp_path / "model", make, config, router=True, num_experts=16)
    compile_for_test(tmp_path / "model", tmp_path / "artifact", context=64, chunk=16)
    assert first_difference(model, tmp_path / "artifact") is None


def _stacked(tensors: dict[str, Tensor], parts: tuple[str, ...], ending: str) -> dict[str, Tensor]:
    """Tensors in which down of all experts of the first layer is one, which is not read."""
    prefix = _EXPERT.removesuffix("3.gate_proj")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if "layers.0.mlp.experts" not in name or ".down_proj." not in name
    }
    for part in parts:
        of_experts = [tensors[f"{prefix}{expert}.down_proj.{part}"] for expert in range(6)]
        whole = torch.stack([each.view(torch.uint8) for each in of_experts]).view(of_experts[0].dtype)
        kept[f"{prefix}down_proj{ending}{part.removeprefix('weight')}"] = whole
    return kept


@pytest.mark.parametrize(
    ("name", "parts", "ending", "says"),
    [
        (
            "gptq",
            ("qweight", "qzeros", "scales", "g_idx"),
            ".",
            r"down_proj\.qweight is I32 \[6, 8, 64\]; a matrix is read",
        ),
        ("fp8", ("weight", "weight_scale_inv"), "", r"down_proj is F8_E4M3; only F32, F16, BF16 are read"),
    ],
)
def test_quantized_stacks_are_refused(
    name: str, parts: tuple[str, ...], ending: str, says: str, tmp_path: Path
) -> None:
    make, config = _KINDS[name][0]
    save_quantized_mixture(tmp_path / "model", make, config)
    file = tmp_path / "model" / "model.safetensors"
    save_file(_stacked(load_file(file), parts, ending), file)
    with pytest.raises(UnsupportedModelError, match=says):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_an_expert_whose_matrix_is_missing(name: str, tmp_path: Path) -> None:
    make, config = _KINDS[name][0]
    save_quantized_mixture(tmp_path / "model", make, config)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.startswith(f"{_EXPERT}.")}
    save_file(kept, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"no tensor .+experts\.3\.gate_proj.* for model\.layers\.0"):
        open_checkpoint(tmp_path / "model")


def test_an_expert_whose_scales_are_missing(tmp_path: Path) -> None:
    make, config = _KINDS["gptq"][0]
    save_quantized_mixture(tmp_path / "model", make, config)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors[f"{_EXPERT}.scales"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"holds .+experts\.3\.gate_proj\.qweight, but no .+\.scales$"):
        open_checkpoint(tmp_path / "model")
