"""Files as PowerInfer writes them, with random predictors, and what can be done to them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float32]
Predictor = tuple[Array, Array]

TYPES = ("F32", "F16", "Q4_0", "Q8_0")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its predictors: D, F, number of layers, and a rank a layer."""

    hidden: int
    neurons: int
    ranks: Sequence[int]


def random_predictors(sizes: Sizes, seed: int) -> list[Predictor]:
    """fc1 [r, D] and fc2 [F, r] of each layer, in float32, from values that f16 has."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return draw.standard_normal((rows, columns)).astype(np.float16).astype(np.float32)

    return [(matrix(rank, sizes.hidden), matrix(sizes.neurons, rank)) for rank in sizes.ranks]


def write_gguf(
    file: Path,
    predictors: Sequence[Predictor],
    type_name: str = "F16",
    threshold: float | None = None,
    extra: Mapping[str, Sequence[object]] | None = None,
) -> None:
    """A PowerInfer GGUF: metadata, some of the model's own tensors, and the predictors in `type_name`."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(file, "llama")
    writer.add_name("Llama")
    writer.add_block_count(len(predictors))
    writer.add_token_list([f"token {number}" for number in range(40)])
    writer.add_token_scores([0.5] * 40)
    if threshold is not None:
        writer.add_float32("powerinfer.sparse_threshold", threshold)
    for key, values in (extra or {}).items():
        writer.add_array(key, values)
    kind = GGMLQuantizationType[type_name]
    for layer, (fc1, fc2) in enumerate(predictors):
        for part, values in (("fc1", fc1), ("fc2", fc2)):
            name = f"blk.{layer}.{part}.weight"
            if type_name == "F32":
                writer.add_tensor(name, values)
            elif type_name == "F16":
                writer.add_tensor(name, values.astype(np.float16))
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("token_embd.weight", np.ones((7, 5), np.float16))
    for layer in range(len(predictors)):
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.full(5, 0.25, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_down_t.weight", np.full((3, 5), 0.5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with file.open("r+b") as opened:
        opened.write(b"PWRI")


def write_folder(folder: Path, predictors: Sequence[Predictor], threshold: float | None = None) -> None:
    """The layout of ReluLLaMA-7B-Predictor: `model_N.pt`, and `config.json` where there is a threshold."""
    import torch

    folder.mkdir(exist_ok=True)
    for layer, matrices in enumerate(predictors):
        state = {f"{part}.weight": torch.from_numpy(m) for part, m in zip(("fc1", "fc2"), matrices, strict=True)}
        torch.save(state, folder / f"model_{layer}.pt")
    if threshold is not None:
        (folder / "config.json").write_text(json.dumps({"sparse_threshold": threshold}))


def write_activations(folder: Path, counts: "Sequence[Tensor]") -> None:
    """`activation_N.pt`: one number a neuron."""
    import torch

    folder.mkdir(exist_ok=True)
    for layer, values in enumerate(counts):
        torch.save(values.clone(), folder / f"activation_{layer}.pt")


def stored(values: Array, type_name: str) -> Array:
    """`values` as a file of `type_name` has them, rounded to f16."""
    from gguf import GGMLQuantizationType, dequantize, quantize

    if type_name not in ("F32", "F16"):
        kind = GGMLQuantizationType[type_name]
        values = dequantize(quantize(values, kind), kind)
    return values.astype(np.float16).astype(np.float32)


def reference_mask(x: Array, predictor: Predictor, threshold: float) -> npt.NDArray[np.bool_]:
    """ggml's: a neuron is left out if its logit is below the threshold. x [T, D] → bool [T, F]."""
    fc1, fc2 = predictor
    return np.maximum(x @ fc1.T, 0) @ fc2.T >= np.float32(threshold)


def forged(file: Path) -> Iterator[tuple[str, bytes]]:
    """Copies of a PowerInfer GGUF with names given twice, arrays in arrays, and other bytes before and after."""
    data, name = file.read_bytes(), b"general.name"
    at = data.index(name) - 8
    yield "the same tensor twice", data.replace(b"blk.1.fc1.weight", b"blk.0.fc1.weight")
    yield "a layer too many", data.replace(b"blk.1.fc1.weight", b"blk.7.fc1.weight")
    yield "the same key twice", data.replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens")
    for depth in (1, 20_000):
        arrays = (9).to_bytes(4, "little") + ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * depth
        yield f"arrays in arrays, {depth} deep", data[: at + 8] + name + arrays + data[at:]
    yield "another file's start", b"PK\x03\x04" + data[4:]
    yield "a plain GGUF's start", b"GGUF" + data[4:]
    yield "more after its end", data + bytes(1000)
    yield "all ones", data[:24] + b"\xff" * (len(data) - 24)
