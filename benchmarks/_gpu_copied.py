"""Dense layer offloading by copies, in PyTorch: what the hybrid engine is held against.

The first layers of a model are on the GPU, as many as the budget holds. The others' weights are in pinned memory of the
host, and are copied to the GPU layer by layer, for every token again, through two buffers: while one layer is computed
the next is copied, also across tokens. In f16 the layers are computed by PyTorch (cuBLAS). PyTorch has no product with
matrices in q4 or q8; there only the copies are made, of the bytes that such layers have, and nothing is computed. That
is faster than any such engine can be.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Weights on the host take turns in so much pinned memory, more than caches hold; pinning all of them takes minutes.
_RING_BYTES = 2**31


@dataclass(frozen=True)
class Layers:
    """`count` layers of `layer_bytes`, of which the GPU holds the first `resident`."""

    shape: Mapping[str, Any]
    count: int
    resident: int
    layer_bytes: int
    computes: bool

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Layers":
        """Of the pack's entry for `layers_dense`."""
        shape = entry["shape"]
        return cls(shape, shape["layers"], entry["resident_layers"], entry["layer_bytes"], entry["quant"] == "f16")


class CopiedDecoder:
    """Decodes tokens that depend on nothing. `depth` tokens are in the cache."""

    def __init__(self, layers: Layers, depth: int, device: str) -> None:
        self._layers, self._device, self._shape = layers, torch.device(device), layers.shape
        self._is_gpu = self._device.type == "cuda"
        elements = layers.layer_bytes // 2
        ring = max(1, min(layers.count - layers.resident, -(-_RING_BYTES // layers.layer_bytes)))
        self._host = [self._random(elements, "cpu") for _ in range(ring)]
        resident = layers.resident if layers.computes else 0
        self._resident = [self._random(elements, device) for _ in range(resident)]
        self._buffers = [torch.empty(elements, dtype=torch.float16, device=device) for _ in range(2)]
        self._copies = torch.cuda.Stream() if self._is_gpu else None
        self._copied = [torch.cuda.Event() for _ in range(2)] if self._is_gpu else []
        self._used = [torch.cuda.Event() for _ in range(2)] if self._is_gpu else []
        self._next = self._shown = 0
        heads, width = self._shape["heads"], self._shape["head_dim"]
        self._cache = torch.randn(2, 1, heads, depth, width, device=device).half()
        self._head = self._random(self._shape["vocab"] * self._shape["hidden"], device) if layers.computes else None
        self._x = torch.randn(1, self._shape["hidden"], device=device).half()
        for _ in range(2):
            self._copy_next()

    def _random(self, elements: int, device: str) -> Tensor:
        deviation = self._shape["hidden"] ** -0.5
        values = torch.empty(elements, dtype=torch.float16, device=self._device).normal_(0, deviation)
        if device != "cpu":
            return values
        return torch.empty(elements, dtype=torch.float16, pin_memory=self._is_gpu).copy_(values)

    def step(self) -> Tensor:
        """One token; logits, or what was put in where nothing is computed."""
        x = self._x
        for layer in range(self._layers.count):
            if layer < self._layers.resident:
                x = self._layer(x, self._resident[layer]) if self._layers.computes else x
                continue
            slot = self._shown % 2
            if self._is_gpu:
                torch.cuda.current_stream().wait_event(self._copied[slot])
            x = self._layer(x, self._buffers[slot]) if self._layers.computes else x
            if self._is_gpu:
                self._used[slot].record()
            self._shown += 1
            self._copy_next()
        return x if self._head is None else functional.linear(x, self._head.view(-1, self._shape["hidden"]))

    def _copy_next(self) -> None:
        """Begins to copy the next of the layers on the host, once the buffer's last use is over."""
        if self._layers.resident == self._layers.count:
            return
        slot, source = self._next % 2, self._host[self._next % len(self._host)]
        if self._copies is None:
            self._buffers[slot].copy_(source)
        else:
            with torch.cuda.stream(self._copies):
                if self._next >= 2:
                    self._copies.wait_event(self._used[slot])
                self._buffers[slot].copy_(source, non_blocking=True)
                self._copied[slot].record(self._copies)
        self._next += 1

    def _layer(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden, ffn, width = (self._shape[key] for key in ("hidden", "ffn", "head_dim"))
        queries, keys = self._shape["heads"] * width, self._shape["kv_heads"] * width
        rows = [
            (queries, hidden),
            (keys, hidden),
            (keys, hidden),
            (hidden, queries),
            *[(ffn, hidden)] * 2,
            (hidden, ffn),
        ]
        parts = torch.split(weights, [n * k for n, k in rows])
        q, k, v, o, gate, up, down = (part.view(size) for part, size in zip(parts, rows, strict=True))
        normed = functional.rms_norm(x, (hidden,))
        query = functional.linear(normed, q).view(1, -1, 1, width)
        functional.linear(normed, k), functional.linear(normed, v)
        attended = functional.scaled_dot_product_attention(query, self._cache[0], self._cache[1])
        x = x + functional.linear(attended.reshape(1, -1), o)
        normed = functional.rms_norm(x, (hidden,))
        return x + functional.linear(
            functional.relu(functional.linear(normed, gate)) * functional.linear(normed, up), down
        )


def measure_copied(entry: Mapping[str, Any], tokens: int, repeats: int, device: str) -> dict[str, Any]:
    """Tokens per second of `CopiedDecoder`: the median of `repeats`, after one that does not count."""
    layers = Layers.of(entry)
    result = {key: entry[key] for key in ("model", "quant", "resident_layers")}
    decoder, speeds = CopiedDecoder(layers, entry["context"] // 2, device), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(tokens):
            y = decoder.step()
        if device != "cpu":
            torch.cuda.synchronize()
        speeds.append(tokens / (time.perf_counter() - start))
    is_finite = bool(torch.isfinite(y).all())
    missing_bytes = (layers.count - layers.resident) * layers.layer_bytes
    speed = statistics.median(speeds[1:])
    copied = missing_bytes * speed
    found = {"variant": "copied", "tokens_per_s": speed, "is_finite": is_finite, "copied_bytes_per_s": copied}
    return result | found | {"computes": layers.computes}
