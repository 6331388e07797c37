"""Checkpoints of GPTQ, AWQ and AutoRound with random integers, and the numbers they stand for, in float64.

Integers are packed one at a time, as the documents of the formats describe them, not as the reader takes them apart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

Integers = npt.NDArray[np.int64]
# The tensors of a random matrix [outputs, inputs] by the ends of their names, and the weight in float64.
Maker = Callable[[int, int, int], tuple[dict[str, Tensor], Tensor]]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """A way to quantize. `desc_act` gives inputs of one group places far from each other.

    `less_one` is how zeros are stored, and `centred` whether they are all in the middle, whatever the config says.
    """

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    sym: bool = False
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    scale_dtype: torch.dtype = torch.float16
    less_one: bool | None = None
    centred: bool | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Return what config.json has as `quantization_config`."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return {**common, "zero_point": True, "version": "gemm"}
        if self.method == "auto-round":
            return {**common, "sym": self.sym, "packing_format": self.checkpoint_format}
        more = {"desc_act": self.desc_act, "sym": self.sym, "checkpoint_format": self.checkpoint_format}
        return {**common, **more}

    @property
    def is_awq(self) -> bool:
        """Return whether tensors are AWQ's."""
        return self.method == "awq" or self.checkpoint_format.endswith("awq")

    def make(self, outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return a random matrix, as `Maker` does."""
        return quantized_matrix(self, outputs, inputs, seed)


def quantized_matrix(scheme: Scheme, outputs: int, inputs: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a random matrix, as `Maker` does."""
    draw = np.random.default_rng(seed)
    most = 2**scheme.bits - 1
    size = inputs if scheme.group_size == -1 else scheme.group_size
    groups = -(-inputs // size)
    codes = draw.integers(0, most + 1, (inputs, outputs))
    # AutoGPTQ's subtraction of 1 cannot express a zero of 0 on its own.
    zeros = draw.integers(1, most + 1, (groups, outputs))
    if scheme.sym if scheme.centred is None else scheme.centred:
        zeros[:] = (most + 1) // 2
    scales = torch.from_numpy(draw.integers(1, 64, (groups, outputs)) / 2.0**11).to(scheme.scale_dtype)
    if scheme.scale_dtype == torch.float32:
        scales *= 1.0001
    index = np.arange(inputs) // size
    if scheme.desc_act:
        index = draw.permutation(index)
    weight = (codes - zeros[index]) * scales.double().numpy()[index]
    tensors = {"scales": scales}
    if scheme.is_awq:
        tensors |= {"qweight": _in_order(codes), "qzeros": _in_order(zeros)}
    else:
        less = scheme.checkpoint_format.endswith("gptq") if scheme.less_one is None else scheme.less_one
        tensors |= {
            "qweight": stream(codes.T, scheme.bits).T.contiguous(),
            "qzeros": stream((zeros - less) % (most + 1), scheme.bits),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
    return tensors, torch.from_numpy(weight.T.copy())


def stream(integers: Integers, bits: int) -> Tensor:
    """Return integers [rows, n], of which each row is one number of n digits, the first the lowest, as int32."""
    words = [_row_words([int(integer) for integer in row], bits) for row in integers]
    return torch.from_numpy(np.stack(words))


def _row_words(row: Sequence[int], bits: int) -> npt.NDArray[np.int32]:
    number = sum(integer << bits * place for place, integer in enumerate(row))
    size = -(-len(row) * bits // 32) * 4
    return np.frombuffer(number.to_bytes(size, "little"), dtype=np.int32)


def _in_order(integers: Integers) -> Tensor:
    """Return integers [rows, columns] packed along their columns, eight of them in the order of AWQ in an int32."""
    columns = integers.shape[1]
    order = [start + column for start in range(0, columns, 8) for column in _AWQ_ORDER]
    return stream(integers[:, order], 4)


def save_made(
    folder: Path, make: Maker, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Save matrices NAME.weight of `shapes` [outputs, inputs], and a norm; return the weights in float64."""
    tensors: dict[str, Tensor] = {"norm.weight": torch.ones(32, dtype=torch.float16)}
    weights = {}
    for seed, (module, (outputs, inputs)) in enumerate(shapes.items()):
        parts, weights[f"{module}.weight"] = make(outputs, inputs, seed)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(config)}))
    return weights


def save_quantized(folder: Path, scheme: Scheme, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Save matrices of a scheme, as `save_made` does."""
    return save_made(folder, scheme.make, scheme.config, shapes)
