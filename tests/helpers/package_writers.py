"""A program: quantize random matrices with compressed-tensors and bitsandbytes, which the interpreter must have.

For each way it writes a folder below its argument: the checkpoint, and `expected.safetensors` with what the package
makes of it again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_OUTPUTS, _INPUTS = 64, 256


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], expected: Tensor) -> None:
    folder.mkdir(parents=True)
    named = {f"up.{part}": tensor.contiguous().clone() for part, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    save_file({"up.weight": expected.float().contiguous()}, folder / "expected.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def _four_bits(folder: Path, weight: Tensor, kind: str, nested: bool) -> None:
    import bitsandbytes.functional as functional

    codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    _save(folder, config, {"weight": codes, **parts}, functional.dequantize_4bit(codes, state))


def _eight_bits(folder: Path, weight: Tensor) -> None:
    import bitsandbytes.functional as functional

    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    _save(folder, config, {"weight": codes, "SCB": largest}, functional.int8_vectorwise_dequant(codes, largest))


def _compressed(folder: Path, weight: Tensor, form: str, **settings: Any) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    settings = {"symmetric": True, **settings}
    arguments = QuantizationArgs(**settings)
    groups = weight.view(len(weight), -1, settings.get("group_size") or weight.shape[1])
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    state = {"weight": weight, "weight_scale": scale}
    if not arguments.symmetric:
        state["weight_zero_point"] = zero
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress(state, scheme)
    group = {"targets": ["Linear"], "weights": settings}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    tensors = {part: value for part, value in parts.items() if isinstance(value, Tensor)}
    _save(folder, config, tensors, compressor.decompress(parts, scheme)["weight"])


def main(folder: Path) -> None:
    """Write all checkpoints."""
    torch.manual_seed(0)
    weight = torch.randn(_OUTPUTS, _INPUTS) * 0.05
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            _four_bits(folder / f"{kind}-{nested}", weight, kind, nested)
    _eight_bits(folder / "int8", weight)
    for bits in (2, 3, 4, 8):
        for symmetric in (False, True):
            more = {"strategy": "group", "group_size": 64, "symmetric": symmetric}
            _compressed(
                folder / f"packed-{bits}-{symmetric}", weight, "pack-quantized", num_bits=bits, type="int", **more
            )
    _compressed(folder / "int-channel", weight, "int-quantized", num_bits=8, type="int", strategy="channel")
    _compressed(folder / "float-channel", weight, "float-quantized", num_bits=8, type="float", strategy="channel")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
