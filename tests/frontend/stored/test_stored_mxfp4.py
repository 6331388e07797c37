"""MXFP4 of gpt-oss: blocks of all experts of a layer."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import picompile_runtime
from helpers.gguf_mixtures import MIXTURES, build_mixture
from helpers.reference import eager_logits, relative_error
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.hf import open_checkpoint
from picompile_passes.dialect import dequantize_rows

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
GATE_UP, DOWN = (f"model.layers.2.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def save_gpt_oss(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a folder as gpt-oss is published, with random blocks and their exponents."""
    model = build_mixture(MIXTURES["gpt-oss"])
    tensors = {name: values.to(dtype) for name, values in model.state_dict().items()}
    generator = torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        shape = (experts, rows, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(117, 123, shape, dtype=torch.uint8, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """What blocks stand for, one number at a time: [experts, rows, inputs]."""
    table = [*_E2M1, *(-value for value in _E2M1)]
    found = torch.empty(*scales.shape, 32)
    for place, (block, scale) in enumerate(
        zip(blocks.reshape(-1, 16).tolist(), scales.flatten().tolist(), strict=True)
    ):
        codes = [code for byte in block for code in (byte & 15, byte >> 4)]
        found.view(-1, 32)[place] = torch.tensor([table[code] * 2.0 ** (scale - 127) for code in codes])
    return found.flatten(2)


def test_the_numbers_and_their_rows(tmp_path: Path) -> None:
    weights, stored = (
        open_checkpoint(save_gpt_oss(tmp_path / "model")).weights,
        load_file(tmp_path / "model/model.safetensors"),
    )
    for name in (GATE_UP, DOWN):
        expected = numbers(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(weights.load(name), expected.transpose(1, 2))
        assert weights.stored()[name] == "mxfp4" and name in weights.turned()
        rows = expected.flatten(0, 1)
        wanted = torch.arange(1, len(rows), 2)
        for some in (None, wanted):
            packed = weights.packed(name, "mxfp4", True, some)
            assert packed is not None
            kept = dequantize_rows(packed, "mxfp4", rows.shape[1])
            assert torch.equal(kept, rows if some is None else rows[wanted])
        assert weights.packed(name, "mxfp4") is None and weights.packed(name, "q8", True) is None
    assert weights.turned() == {name for name in weights.names() if name.endswith(("gate_up_proj", "down_proj"))}
    assert weights.load(f"{GATE_UP}_bias").dtype == torch.bfloat16


def test_the_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    folder = save_gpt_oss(tmp_path / "model")
    model = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    weights, state = open_checkpoint(folder).weights, model.state_dict()
    assert set(weights.names()) == state.keys()
    for name, values in state.items():
        assert torch.equal(weights.load(name).float(), values), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{GATE_UP}_scales": None}, "holds .*gate_up_proj_blocks, but no .*gate_up_proj_scales"),
        ({f"{GATE_UP}_scales": torch.zeros(8, 192, 3, dtype=torch.uint8)}, r"_scales is \[8, 192, 3\], but .* needs"),
        ({f"{DOWN}_blocks": torch.zeros(8, 64, 48, dtype=torch.uint8)}, r"is \[8, 64, 48\]; blocks of 16 bytes"),
        ({f"{DOWN}_blocks": torch.zeros(8, 64, 3, 16)}, "down_proj_blocks is F32; U8 is read"),
        ({DOWN: torch.zeros(8, 96, 64)}, "holds .*down_proj and .*: two weights"),
        ({f"{GATE_UP}_blocks": None}, "no tensor .*gate_up_proj, which|holds .*gate_up_proj_scales, which"),
    ],
)
def test_damage(tmp_path: Path, change: dict[str, Tensor | None], says: str) -> None:
    folder = save_gpt_oss(tmp_path / "model")
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | change
    save_file({name: values for name, values in tensors.items() if values is not None}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=says):
        open_checkpoint(folder)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}_scales"][3, 5, 1] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="NaN or infinite values"):
        open_checkpoint(folder).weights.load(DOWN)
    assert open_checkpoint(folder).weights.packed(DOWN, "mxfp4", True) is None


def test_blocks_without_a_method_are_refused(tmp_path: Path) -> None:
    folder = save_gpt_oss(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="a part of a quantized matrix"):
        open_checkpoint(folder)


@pytest.mark.slow("compiles a model")
def test_a_compiled_gpt_oss_has_its_numbers(tmp_path: Path) -> None:
    """But for activations, of 16 bits, and plain weights of 16 bits, the compiled model is the checkpoint."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    folder = save_gpt_oss(tmp_path / "model", torch.float16)
    model = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    ).eval()
    compile_model(folder, tmp_path / "artifact", CompileOptions(context=64))
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    assert Counter(report["weight_formats"].values()) == {"mxfp4": 3 * 3, "f16": 3 * 5 + 2}
    ids = [3, 5, 7, 11, 13, 17, 19]
    with picompile_runtime.load(tmp_path / "artifact", threads=1) as engine:
        found = torch.from_numpy(engine.prefill(ids).copy())
    assert relative_error(found, eager_logits(model, ids)[-1].view_as(found)) < 2.5e-3
