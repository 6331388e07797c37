"""Baselines of the sparse kernels and the hybrid engine, in PyTorch on the GPU.

`matrix_vector_seconds` is the dense matrix-vector product of cuBLAS. `measure_copied` is dense layer offloading by
copies: the first layers of a model are on the GPU, as many as the budget holds. The others' weights are in pinned
memory of the host, and are copied to the GPU layer by layer, for every token again, through two buffers: while one
layer is computed the next is copied, also across tokens. In f16 the layers are computed by PyTorch (cuBLAS). PyTorch
has no product with matrices in q4 or q8; there only the copies are made, of the bytes that such layers have, and
nothing is computed. That is faster than any such engine can be.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_DEVICE = "cuda"
_WORKING_SET_BYTES = 2**28
_ROUNDS, _GRAPHS = 20, 7
# Weights on the host take turns in so much pinned memory, more than caches hold; pinning all of them takes minutes.
_RING_BYTES = 2**31


def matrix_vector_seconds(rows: int, columns: int, matrices: int) -> float:
    """Seconds of `matrices` products of float16 [rows, columns] with a vector, one after another; nothing else.

    The weights take turns, and are several times the second-level cache. The faster of the two ways to ask for it,
    `mv` and `linear`; each is a graph of many products, so that launches do not count.
    """
    copies = max(2, -(-_WORKING_SET_BYTES // (2 * rows * columns))) + matrices
    weights = [torch.randn(rows, columns, device="cuda").mul_(columns**-0.5).half() for _ in range(copies)]
    x = torch.randn(columns, device="cuda").half()
    ways: tuple[Callable[[Tensor], Tensor], ...] = (lambda w: torch.mv(w, x), lambda w: functional.linear(x[None], w))
    return matrices * min(_seconds(way, weights) for way in ways)


def _seconds(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """The median time of one product, after as many graphs that do not count."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights * _ROUNDS:
            product(weight)
    times = []
    for _ in range(4 * _GRAPHS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (_ROUNDS * len(weights)))
    return float(statistics.median(times[-_GRAPHS:]))


class CopiedDecoder:
    """Decodes tokens that depend on nothing. The cache is half full."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        """`entry` is the pack's for `layers_dense`."""
        self._shape, self._resident_count = entry["shape"], entry["resident_layers"]
        self._layers = self._shape["layers"]
        self.computes = entry["quant"] == "f16"
        elements = entry["layer_bytes"] // 2
        self.missing_bytes = (self._layers - self._resident_count) * entry["layer_bytes"]
        ring = max(1, min(self._layers - self._resident_count, -(-_RING_BYTES // entry["layer_bytes"])))
        self._host = [self._random(elements).cpu().pin_memory() for _ in range(ring)]
        self._resident = [self._random(elements) for _ in range(self._resident_count if self.computes else 0)]
        self._buffers = [torch.empty(elements, dtype=torch.float16, device=_DEVICE) for _ in range(2)]
        self._copies = torch.cuda.Stream()
        self._copied, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._next = self._shown = 0
        heads, width = self._shape["heads"], self._shape["head_dim"]
        self._cache = torch.randn(2, 1, heads, entry["context"] // 2, width, device=_DEVICE).half()
        self._head = self._random(self._shape["vocab"] * self._shape["hidden"]) if self.computes else None
        self._x = torch.randn(1, self._shape["hidden"], device=_DEVICE).half()
        torch.cuda.synchronize()
        for _ in range(2):
            self._copy_next()

    def _random(self, elements: int) -> Tensor:
        values = torch.empty(elements, dtype=torch.float16, device=_DEVICE)
        return values.normal_(0, self._shape["hidden"] ** -0.5)

    def step(self) -> Tensor:
        """One token; logits, or what was put in where nothing is computed."""
        x, compute = self._x, torch.cuda.current_stream()
        for layer in range(self._layers):
            if layer < self._resident_count:
                x = self._layer(x, self._resident[layer]) if self.computes else x
                continue
            slot = self._shown % 2
            compute.wait_event(self._copied[slot])
            x = self._layer(x, self._buffers[slot]) if self.computes else x
            self._used[slot].record()
            self._shown += 1
            self._copy_next()
        return x if self._head is None else functional.linear(x, self._head.view(-1, self._shape["hidden"]))

    def _copy_next(self) -> None:
        """Begins to copy the next of the layers on the host, once the buffer's last use is over."""
        if self.missing_bytes == 0:
            return
        slot, source = self._next % 2, self._host[self._next % len(self._host)]
        with torch.cuda.stream(self._copies):
            if self._next >= 2:
                self._copies.wait_event(self._used[slot])
            self._buffers[slot].copy_(source, non_blocking=True)
            self._copied[slot].record(self._copies)
        self._next += 1

    def _layer(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden, ffn, width = (self._shape[key] for key in ("hidden", "ffn", "head_dim"))
        queries, keys = self._shape["heads"] * width, self._shape["kv_heads"] * width
        rows = [(queries, hidden), *[(keys, hidden)] * 2, (hidden, queries), *[(ffn, hidden)] * 2, (hidden, ffn)]
        parts = torch.split(weights[: sum(n * k for n, k in rows)], [n * k for n, k in rows])
        q, k, v, o, gate, up, down = (part.view(size) for part, size in zip(parts, rows, strict=True))
        normed = functional.rms_norm(x, (hidden,))
        query = functional.linear(normed, q).view(1, -1, 1, width)
        functional.linear(normed, k), functional.linear(normed, v)
        attended = functional.scaled_dot_product_attention(query, self._cache[0], self._cache[1])
        x = x + functional.linear(attended.reshape(1, -1), o)
        normed = functional.rms_norm(x, (hidden,))
        inner = functional.relu(functional.linear(normed, gate)) * functional.linear(normed, up)
        return x + functional.linear(inner, down)


def measure_copied(entry: Mapping[str, Any], tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of `CopiedDecoder`: the median of `repeats`, after one that does not count."""
    decoder, speeds = CopiedDecoder(entry), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(tokens):
            y = decoder.step()
        torch.cuda.synchronize()
        speeds.append(tokens / (time.perf_counter() - start))
    speed = statistics.median(speeds[1:])
    return {
        "tokens_per_s": speed,
        "copied_bytes_per_s": decoder.missing_bytes * speed,
        "computes": decoder.computes,
        "is_right": bool(torch.isfinite(y).all()),
    }
