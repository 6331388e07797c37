"""Undoing what converters do to tensors, by the records of architectures or by transformers' own processors.

llama.cpp's converters change the order of rows (Llama's queries and keys, BLOOM's and Falcon's fused projections),
transpose (GPT-2), or compute (1 + weight of Gemma's norms). A processor takes a whole tensor as numbers; where it only
moves rows, which is found by giving it the numbers of rows, packed rows can be moved as well.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, GGUFTensor, TensorProcessor

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.architecture import Architecture
from picompile.frontend.gguf.model_config import shared_field
from picompile.frontend.messages import one_line, shown

_PROBE_COLUMNS = 3
# More than any vocabulary has; a file of one column can have a row for every two bytes.
_MOST_ROWS = 1 << 22


class _FalconProcessor:
    """Falcon's fused projection: queries of all heads, keys, values; in the model, these of each group of heads.

    transformers has no processor for it, and gives models with several groups (Falcon-40B) a wrong order.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._heads = config["num_attention_heads"]
        self._kv_heads = config["num_kv_heads"]

    def preprocess_name(self, name: str) -> str:
        """Return `name`."""
        return name

    def perform_fallback_tensor_mapping(self, names: Any, suffix: str, qualifier: str, name: str) -> None:
        """Add no names."""

    def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
        """Return what is made of a tensor, as transformers' processors do."""
        if ".attn_qkv." in name:
            groups, per_group = self._kv_heads, self._heads // self._kv_heads
            head_dim = len(weights) // (self._heads + 2 * groups)
            query, key, value = np.split(weights, [self._heads * head_dim, (self._heads + groups) * head_dim])
            rest = weights.shape[1:]
            parts = [query.reshape(groups, per_group, head_dim, *rest)]
            parts += [part.reshape(groups, 1, head_dim, *rest) for part in (key, value)]
            weights = np.concatenate(parts, axis=1).reshape(weights.shape)
        return GGUFTensor(weights, name, {})


class _RecordProcessor:
    """Undo what llama.cpp's converter does to the tensors of an architecture that has a record."""

    def __init__(self, record: Architecture, config: Mapping[str, Any]) -> None:
        self._record = record
        self._heads = shared_field(config, "attention.head_count")
        self._kv_heads = shared_field(config, "attention.head_count_kv") or self._heads

    def preprocess_name(self, name: str) -> str:
        """Return `name`."""
        return name

    def perform_fallback_tensor_mapping(self, names: Any, suffix: str, qualifier: str, name: str) -> None:
        """Add no names."""

    def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
        """Return what is made of a tensor, as transformers' processors do."""
        part = name.split(".")[2] if name.startswith("blk.") else ""
        heads = {"attn_q": self._heads, "attn_k": self._kv_heads}.get(part)
        if self._record.interleaved and heads:
            pairs = weights.reshape(heads, len(weights) // heads // 2, 2, *weights.shape[1:])
            weights = pairs.swapaxes(1, 2).reshape(weights.shape)
        if self._record.rows_by_part and part == "attn_qkv":
            parts = weights.reshape(3, self._heads, len(weights) // self._heads // 3, *weights.shape[1:])
            weights = parts.swapaxes(0, 1).reshape(weights.shape)
        if self._record.plus_one and name.endswith("norm.weight"):
            weights = weights - 1
        if part in ("attn_k_b", "attn_v_b"):
            return self._latent(weights, name, part, kwargs["parsed_parameters"]["tensors"])
        return GGUFTensor(weights, name, {})

    def _latent(self, weights: Any, name: str, part: str, kept: dict[str, Any]) -> Any:
        """Join what makes keys and values of a latent vector: of each head the rows for its key, then for its value.

        Files have those for keys transposed, [heads, rank, size].
        """
        kept[part] = np.swapaxes(weights, 1, 2) if part == "attn_k_b" else weights
        if not {"attn_k_b", "attn_v_b"} <= kept.keys():
            return GGUFTensor(weights, None, {})
        joined = np.concatenate([kept.pop("attn_k_b"), kept.pop("attn_v_b")], axis=1)
        return GGUFTensor(joined.reshape(-1, joined.shape[-1]), name, {})

    @property
    def is_plain(self) -> bool:
        """Return whether every tensor stays as it is."""
        return not (self._record.interleaved or self._record.rows_by_part or self._record.plus_one)


def processor_for(architecture: str, config: Mapping[str, Any], record: Architecture | None) -> Any:
    """Return transformers' processor for the tensors of an architecture, or ours; `record` is its record."""
    if architecture == "falcon":
        return _FalconProcessor(config)
    if record is not None:
        return _RecordProcessor(record, config)
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(config))


def row_order(processor: Any, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64] | None:
    """Return which row of the file's tensor is each row of the parameter, None where more is done than moving rows.

    For a matrix, a vector counting as one of one column.
    """
    rows, columns = shape[0] if shape else 1, _PROBE_COLUMNS
    if type(processor).process is TensorProcessor.process or getattr(processor, "is_plain", False):
        return np.arange(rows)
    if rows > _MOST_ROWS:
        return None
    probe = np.arange(rows * columns).reshape(rows, columns)
    numbers = probe if len(shape) > 1 else probe[:, 0] // columns
    with np.errstate(all="ignore"):
        try:
            result = processor.process(numbers, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
        except (ValueError, KeyError, IndexError, TypeError):
            return None
        weights = result.weights
        if result.name != name or weights.shape != numbers.shape or weights.dtype != numbers.dtype:
            return None
        order = weights[:, 0] // columns if len(shape) > 1 else weights
    if not np.array_equal(np.sort(order), np.arange(rows)) or not np.array_equal(numbers[order], weights):
        return None
    return np.asarray(order, dtype=np.int64)


def number_added(processor: Any, name: str, shape: tuple[int, ...]) -> float | None:
    """Return the number that a processor adds to each number of a vector, None where it does anything else.

    Gemma's files have one more than the weights of its norms.
    """
    if len(shape) != 1 or shape[0] > _MOST_ROWS:
        return None
    probe = np.linspace(-3, 5, shape[0], dtype=np.float32)
    try:
        made = processor.process(probe, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    if made.name != name or made.weights.shape != probe.shape or len(probe) == 0:
        return None
    added = np.round(made.weights[0] - probe[0])
    same = made.weights.dtype == probe.dtype and np.array_equal(made.weights, probe + added)
    return float(added) if same else None


def convert(processor: Any, names: Mapping[str, str], parameter: str, sources: Mapping[str, Tensor]) -> Tensor:
    """Return the parameter that a processor makes of its tensors, float32; `names` as `map_names` gives them.

    Raises `UnsupportedModelError` for a tensor that the processor cannot take.
    """
    made: dict[str, Tensor] = {}
    with np.errstate(all="ignore"):
        for name, values in sources.items():
            numbers = values.to(torch.float32).numpy()
            try:
                result = processor.process(
                    numbers, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": made}
                )
            except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
                raise UnsupportedModelError(f"{shown(name)} cannot be converted: {one_line(error)}") from error
            if result.name is not None:
                made[parameter] = torch.from_numpy(np.ascontiguousarray(result.weights))
    return made[parameter] if parameter in made else next(iter(made.values()))
