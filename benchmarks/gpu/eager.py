"""The model of a pack in eager PyTorch, float64, from the weights of an artifact: what whole models are held against.

It shares nothing but the formats of weights with picompile: norms, rotary embedding, attention over all keys,
predictors and blocks are written down as the checkpoint's architecture (Llama with ReLU) has them. Keys and values are
rounded to float16, as the cache has them.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.weights import Array
from picompile_passes.dialect import dequantize_rows
from picompile_runtime.artifact.reader import Artifact

# A token is drawn again at most so often: one of five is taken.
_MOST_DRAWN = 500


class EagerModel:
    """Logits of all tokens of a text at once.

    Predictors decide about a neuron whose logit is next to the threshold by their rounding, and then a right engine and
    this model differ by all that the neuron adds. So `draw` makes texts in which no logit is that close.
    """

    def __init__(self, artifact: Artifact, entry: Mapping[str, Any]) -> None:
        """`entry` is the pack's for this artifact, whose folder has the pack's `weights.json`."""
        self._artifact, self._shape = artifact, entry["shape"]
        listed = json.loads((artifact.folder / "weights.json").read_text())["tensors"]
        self._formats = {tensor["name"]: tensor["format"] for tensor in listed if "format" in tensor}
        self._matrices: dict[tuple[str, int], Tensor] = {}
        self._bundles: dict[int, tuple[Tensor, ...]] = {}
        # By token, the predictors' logit that is the nearest to their threshold in the latest `logits`.
        self.nearest = torch.empty(0)

    def draw(self, rng: np.random.Generator, prompt: int, decoded: int, margin: float) -> list[int]:
        """Return random tokens: `prompt` of them, and `decoded` for which no predictor's logit is within `margin` of
        its threshold.

        Raises RuntimeError if no token has such a margin.
        """
        tokens: list[int] = rng.integers(0, self._shape["vocab"], prompt).tolist()
        for _ in range(decoded):
            for token in rng.integers(0, self._shape["vocab"], _MOST_DRAWN).tolist():
                self.logits([*tokens, token], prompt)
                if float(self.nearest[-1]) > margin:
                    tokens.append(token)
                    break
            else:
                raise RuntimeError(f"a predictor's logit is within {margin} of its threshold for every token")
        return tokens

    def logits(self, tokens: list[int], prompt: int) -> Tensor:
        """float64 [tokens, vocab]. Of the first `prompt` tokens every neuron is computed, as where prompts are read."""
        self.nearest = torch.full((len(tokens),), math.inf, dtype=torch.float64)
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
        gate, up, down = self._neurons(layer)
        name = f"predictors.layers.{layer}"
        rank = self._artifact.tensors[f"{name}.fc1"].shape[0]
        hidden = x @ self._matrix(f"{name}.fc1", self._shape["hidden"]).T
        logits = hidden @ self._matrix(f"{name}.fc2", rank).T + self._vector(f"{name}.bias")[: len(gate)]
        self.nearest = torch.minimum(self.nearest, logits.abs().amin(dim=1))
        named = logits > 0
        named[:prompt] = True
        return (torch.relu(x @ gate.T) * (x @ up.T) * named) @ down

    def _neurons(self, layer: int) -> tuple[Tensor, ...]:
        """Return the gate, up and down rows of all neurons of a layer, the hot ones first."""
        if layer not in self._bundles:
            names = [f"layers.{layer}.ffn.neurons{part}" for part in ("", ".hot", ".cold")]
            names = [name for name in names if name in self._artifact.tensors]
            bundle = torch.cat([self._unpacked(name, self._shape["hidden"]) for name in names])
            self._bundles[layer] = tuple(bundle[part::3].contiguous() for part in range(3))
        return self._bundles[layer]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._vector(name)[: x.shape[-1]], self._shape["eps"])

    def _matrix(self, name: str, columns: int) -> Tensor:
        """Return a matrix of the artifact, float64 [rows, columns]. Of q, k and v the rows lie one behind the other."""
        if (name, columns) not in self._matrices:
            self._matrices[name, columns] = self._unpacked(name, columns)
        return self._matrices[name, columns]

    def _unpacked(self, name: str, columns: int) -> Tensor:
        start, stop, stored = 0, None, name
        if name not in self._artifact.tensors:
            start, stop, stored = self._rows_of_joined(name)
        packed = torch.from_numpy(self._bytes(stored).reshape(self._artifact.tensors[stored].shape)[start:stop].copy())
        return dequantize_rows(packed, self._formats[stored], columns).to(torch.float64)

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
