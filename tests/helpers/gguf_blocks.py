"""Random blocks of GGML's types, and GGUF files of Llamas that are made of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.gguf_files import EXAMPLES, build, byte_level_metadata, gguf_tensors, write_file

Bytes = npt.NDArray[np.uint8]

# Weights and bytes of a block.
# Where each block has float16 numbers: `ggml-common.h` of llama.cpp.
HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("MXFP4", "NVFP4", "IQ1_M"), ()),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_blocks(rng: np.random.Generator, type_name: str, rows: int, columns: int) -> Bytes:
    """Return blocks [rows, blocks, bytes] of any bytes but those of scales that are no numbers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    _put_halves(data, type_name, rng.uniform(-2, 2, (len(HALVES[type_name]), *data.shape[:2])))
    if type_name == "MXFP4":
        data[..., 0] = rng.integers(1, 253, data.shape[:2])
    if type_name == "IQ1_M":
        _put_half_of_iq1_m(data, rng.uniform(-2, 2, data.shape[:2]))
    return data


def _put_half_of_iq1_m(data: Bytes, values: npt.NDArray[np.float64]) -> None:
    """Put a float16 for each block into the high four bits of its last four 16-bit words, the lowest ones first."""
    bits = values.astype(np.float16).view(np.uint16)
    for word in range(4):
        high = data[..., 49 + 2 * word]
        high[...] = high & 15 | (bits >> (4 * word) & 15).astype(np.uint8) << 4


def blocks_of_size(rng: np.random.Generator, type_name: str, rows: int, columns: int, size: float) -> Bytes:
    """Return random blocks uint8 [rows, row bytes], of weights whose mean square is about that of `size`."""
    from gguf import GGMLQuantizationType, dequantize

    data = random_blocks(rng, type_name, rows, columns)
    # Both have the numbers of E2M1, whose mean square is 8.6 for codes that are all as frequent.
    exponent = int(np.log2(size / 8.6**0.5).round())
    if type_name == "MXFP4":
        data[..., 0] = 127 + exponent
    elif type_name == "IQ1_M":
        _put_half_of_iq1_m(data, np.full(data.shape[:2], size / 9))
    elif type_name == "NVFP4":
        data[..., :4] = 8 * (7 + exponent) + rng.integers(0, 8, (*data.shape[:2], 4))
    else:
        values = dequantize(data.reshape(rows, -1), GGMLQuantizationType[type_name])
        _put_halves(data, type_name, _halves(data, type_name) * size / np.square(values).mean() ** 0.5)
    return data.reshape(rows, -1)


def _halves(data: Bytes, type_name: str) -> npt.NDArray[Any]:
    found = [data[..., place : place + 2].copy().view(np.float16)[..., 0] for place in HALVES[type_name]]
    return np.stack(found).astype(np.float64)


def _put_halves(data: Bytes, type_name: str, values: npt.NDArray[np.float64]) -> None:
    for place, halves in zip(HALVES[type_name], values, strict=True):
        data[..., place : place + 2] = np.ascontiguousarray(halves.astype(np.float16)[..., None]).view(np.uint8)


def save_llama_of_blocks(file: Path, types: Mapping[str, str], seed: int = 0, **changes: Any) -> None:
    """Write a small random Llama as a GGUF file whose matrices are blocks of `types`, by names as `attn_q`.

    Matrices that have no type are float32. `changes` are of the config of the example.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 304, **changes}
    example = replace(EXAMPLES["llama"], config={**EXAMPLES["llama"].config, **sizes})
    model, rng, tensors, blocks = build(example, seed), np.random.default_rng(seed), {}, {}
    for name, values in gguf_tensors(example, model):
        type_name = types.get(name.split(".")[-2])
        tensors[name] = values
        if type_name is not None:
            size = 1.0 if "embd" in name else values.shape[1] ** -0.5
            tensors[name], blocks[name] = blocks_of_size(rng, type_name, *values.shape, size=size), type_name
    metadata = {f"llama.{key}": value for key, value in example.metadata(model.config).items()}
    metadata |= byte_level_metadata(sizes["vocab_size"])
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    write_file(file, "llama", metadata, tensors, blocks=blocks)
