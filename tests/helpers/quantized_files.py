"""Checkpoints of GPTQ and AWQ with random integers, and the numbers they stand for, in float64.

Integers are packed one at a time, as the documents of the formats describe them, not as the reader takes them apart.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

Integers = npt.NDArray[np.int64]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """A way to quantize. `desc_act` gives inputs of one group places far from each other."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    sym: bool = False
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    scale_dtype: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        """Return what config.json has as `quantization_config`."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return {**common, "zero_point": True, "version": "gemm"}
        more = {"desc_act": self.desc_act, "sym": self.sym, "checkpoint_format": self.checkpoint_format}
        return {**common, **more}


def quantized_matrix(scheme: Scheme, outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random matrix by the ends of their names, and the weight in float64 [outputs, inputs]."""
    draw = np.random.default_rng(seed)
    most = 2**scheme.bits - 1
    size = inputs if scheme.group_size == -1 else scheme.group_size
    groups = -(-inputs // size)
    codes = draw.integers(0, most + 1, (inputs, outputs))
    # AutoGPTQ's subtraction of 1 cannot express a zero of 0 on its own.
    zeros = draw.integers(1, most + 1, (groups, outputs))
    if scheme.sym:
        zeros[:] = (most + 1) // 2
    scales = torch.from_numpy(draw.uniform(0.001, 0.1, (groups, outputs))).to(scheme.scale_dtype)
    index = np.arange(inputs) // size
    if scheme.desc_act:
        index = draw.permutation(index)
    weight = (codes - zeros[index]) * scales.double().numpy()[index]
    tensors = {"scales": scales}
    if scheme.method == "awq":
        tensors |= {"qweight": _columns(codes, 4, _AWQ_ORDER), "qzeros": _columns(zeros, 4, _AWQ_ORDER)}
    else:
        order = tuple(range(32 // scheme.bits))
        less = 1 if scheme.checkpoint_format == "gptq" else 0
        tensors |= {
            "qweight": _columns(codes.T, scheme.bits, order).T.contiguous(),
            "qzeros": _columns(zeros - less, scheme.bits, order),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
    return tensors, torch.from_numpy(weight.T.copy())


def _columns(integers: Integers, bits: int, order: tuple[int, ...]) -> Tensor:
    """Integers [rows, columns] packed into int32 along their columns; place i has the integer `order[i]` of a word."""
    rows, columns = integers.shape
    words = np.zeros((rows, columns // len(order)), dtype=np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for place, column in enumerate(order):
                words[row, word] |= np.uint32(int(integers[row, word * len(order) + column]) << bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def save_quantized(folder: Path, scheme: Scheme, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Save matrices NAME.weight of `shapes` [outputs, inputs], and a norm; return the weights in float64."""
    tensors: dict[str, Tensor] = {"norm.weight": torch.ones(32, dtype=torch.float16)}
    weights = {}
    for seed, (module, (outputs, inputs)) in enumerate(shapes.items()):
        parts, weights[f"{module}.weight"] = quantized_matrix(scheme, outputs, inputs, seed)
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme.config}))
    return weights
