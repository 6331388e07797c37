"""The model of a pack in eager PyTorch, float64, from the weights of an artifact: what whole models are held against.

It shares nothing but the formats of weights with picompile: norms, rotary embedding, attention over all keys,
predictors and blocks are written down as the checkpoint's architecture (Llama with ReLU) has them. Keys and values are
rounded to float16, as the cache has them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from _gpu_weights import Array
from torch import Tensor
from torch.nn import functional

from picompile_passes.dialect import dequantize_rows
from picompile_passes.weight_formats import predictor_format
from picompile_runtime.artifact.reader import Artifact


class EagerModel:
    """Logits of all tokens of a text at once."""

    def __init__(self, artifact: Artifact, entry: Mapping[str, Any]) -> None:
        """`entry` is the pack's for this artifact."""
        self._artifact, self._shape, self._quant = artifact, entry["shape"], entry["quant"]

    def logits(self, tokens: list[int], prompt: int) -> Tensor:
        """float64 [tokens, vocab]. Of the first `prompt` tokens every neuron is computed, as where prompts are read."""
        x = self._matrix("model.embed_tokens.weight", self._shape["hidden"])[torch.tensor(tokens)]
        for layer in range(self._shape["layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm.weight"), f"{name}.self_attn")
            x = x + self._block(self._norm(x, f"{name}.post_attention_layernorm.weight"), layer, prompt)
        return self._norm(x, "model.norm.weight") @ self._matrix("lm_head.weight", self._shape["hidden"]).T

    def _attention(self, x: Tensor, name: str) -> Tensor:
        heads, kv_heads, width = (self._shape[key] for key in ("heads", "kv_heads", "head_dim"))
        q, k, v = (x @ self._matrix(f"{name}.{each}_proj.weight", self._shape["hidden"]).T for each in "qkv")
        queries, keys = (self._turned(each.reshape(len(x), -1, width)) for each in (q, k))
        keys, values = (each.half().double() for each in (keys, v.reshape(len(x), -1, width)))
        keys, values = (each.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for each in (keys, values))
        y = functional.scaled_dot_product_attention(queries.transpose(0, 1), keys, values, is_causal=True)
        return y.transpose(0, 1).reshape(len(x), -1) @ self._matrix(f"{name}.o_proj.weight", heads * width).T

    def _turned(self, x: Tensor) -> Tensor:
        half = self._shape["head_dim"] // 2
        frequencies = self._shape["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _block(self, x: Tensor, layer: int, prompt: int) -> Tensor:
        names = [f"layers.{layer}.ffn.neurons{part}" for part in ("", ".hot", ".cold")]
        names = [name for name in names if name in self._artifact.tensors]
        bundle = torch.cat([self._matrix(name, self._shape["hidden"]) for name in names])
        gate, up, down = (bundle[part::3] for part in range(3))
        name = f"predictors.layers.{layer}"
        rank = self._artifact.tensors[f"{name}.fc1"].shape[0]
        hidden = x @ self._matrix(f"{name}.fc1", self._shape["hidden"]).T
        logits = hidden @ self._matrix(f"{name}.fc2", rank).T + self._vector(f"{name}.bias")[: len(gate)]
        named = logits > 0
        named[:prompt] = True
        return (torch.relu(x @ gate.T) * (x @ up.T) * named) @ down

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._vector(name)[: x.shape[-1]], self._shape["eps"])

    def _matrix(self, name: str, columns: int) -> Tensor:
        """Predictors have a format of their own. Of q, k and v the rows lie one behind the other."""
        start, stop, stored = 0, None, name
        if name not in self._artifact.tensors:
            start, stop, stored = self._rows_of_joined(name)
        packed = torch.from_numpy(self._bytes(stored).reshape(self._artifact.tensors[stored].shape)[start:stop].copy())
        form = predictor_format(self._quant) if name.startswith("predictors.") else self._quant
        return dequantize_rows(packed, form, columns).to(torch.float64)

    def _rows_of_joined(self, name: str) -> tuple[int, int, str]:
        """Return the first row of a projection, the one behind the last, and the name of the tensor."""
        layer, _, projection = name.rpartition(".self_attn.")
        queries, keys = (self._shape[key] * self._shape["head_dim"] for key in ("heads", "kv_heads"))
        starts = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
        return *starts[projection[0]], f"{layer}.self_attn.q_proj.weight.joined"

    def _vector(self, name: str) -> Tensor:
        return torch.from_numpy(self._bytes(name).view(np.float32).copy()).to(torch.float64)

    def _bytes(self, name: str) -> Array:
        tensor = self._artifact.tensors[name]
        return np.frombuffer(self._artifact.weights, np.uint8, tensor.size_bytes, tensor.offset)
