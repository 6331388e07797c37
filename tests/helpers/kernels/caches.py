"""Caches for tests, and what attention makes of them in float64."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from helpers.kernels.workbench import Array, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import AttentionSpec, Mode
from picompile_passes.formats import FORMATS, GROUP
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

SCALE = 0.3


@dataclass(frozen=True)
class Heads:
    """Numbers and widths of heads."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    kv_dtype: str = "float16"
    context: int = 203
    sequences: int = 1
    softcap: float = 0.0
    slopes: bool = False
    sinks: bool = False

    def kernel(self, mode: Mode, rows: int, *, extend: bool = False, turn: bool = False) -> Kernel:
        """The attention kernel of these heads."""
        spec = AttentionSpec(**asdict(self), rows=rows, scale=SCALE, mode=mode, extend=extend, turn=turn)
        return cpu.write_kernel(spec)

    def options(self, rng: np.random.Generator) -> dict[str, Array]:
        """Random slopes and sinks, those that the kernel takes: slopes of both signs, sinks as large as scores."""
        given = {"slopes": (self.slopes, 0.1), "sinks": (self.sinks, 10.0)}
        return {name: size * uniform(rng, self.heads) for name, (present, size) in given.items() if present}


@dataclass(frozen=True)
class Cached:
    """A cache: what a kernel is given, and what that stands for, float64 [sequences, kv_heads, context, width]."""

    arguments: dict[str, Array]
    values: NDArray[np.float64]


def random_cache(rng: np.random.Generator, shape: Heads, side: str, filled: list[int]) -> Cached:
    """Keys ("k") or values ("v"), so many positions of each sequence; the rest is NaN, or -1 as an integer."""
    width = shape.head_dim if side == "k" else shape.value_dim
    size = (shape.sequences, shape.kv_heads, shape.context)
    exact = np.full((*size, width), np.nan)
    for slot, count in enumerate(filled):
        exact[slot, :, :count] = rng.uniform(-1, 1, (shape.kv_heads, count, width))
    if shape.kv_dtype == "q4":
        packed, scales, stands_for = in_q4(exact)
        missing = np.isnan(exact[..., 0])
        packed[missing], scales[missing] = 255, np.nan
        stands_for[np.isnan(exact)] = np.nan
        return Cached({f"{side}_cache": packed, f"{side}_cache_scales": scales}, stands_for)
    if shape.kv_dtype != "q8":
        stored = exact.astype(shape.kv_dtype)
        return Cached({f"{side}_cache": stored}, stored.astype(np.float64))
    data, scales, stands_for = in_q8(exact)
    missing = np.isnan(exact)
    data[missing] = -1
    scales[np.isnan(exact[..., 0])] = np.nan
    return Cached({f"{side}_cache": data, f"{side}_cache_scales": scales}, np.where(missing, np.nan, stands_for))


def in_q8(exact: Array) -> tuple[NDArray[np.int8], NDArray[np.float16], NDArray[np.float64]]:
    """Rows as weights are packed in q8: bytes, scales, and what these stand for. NaN is taken for 0."""
    width, groups = exact.shape[-1], -(-exact.shape[-1] // GROUP)
    packed = quantize_rows(torch.from_numpy(np.nan_to_num(exact).reshape(-1, width).astype(np.float32)), "q8")
    values = dequantize_rows(packed, "q8", width).numpy().astype(np.float64).reshape(exact.shape)
    data = packed[:, :width].contiguous().numpy().view(np.int8).reshape(exact.shape)
    scales = packed[:, groups * GROUP : groups * (GROUP + 2)].contiguous().numpy().view(np.float16)
    return data.copy(), scales.reshape(*exact.shape[:-1], groups).copy(), values


def in_q4(exact: Array) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float64]]:
    """Rows as weights are packed in q4 behind a Hadamard matrix: pairs of codes, scales, and what these stand for.

    NaN is taken for 0.
    """
    width, groups = exact.shape[-1], exact.shape[-1] // GROUP
    turned = spread(np.nan_to_num(exact)).reshape(-1, width).astype(np.float32)
    packed = quantize_rows(torch.from_numpy(turned), "q4", fit=False)
    values = spread(dequantize_rows(packed, "q4", width).numpy().astype(np.float64).reshape(exact.shape))
    data = packed[:, : width // 2].contiguous().numpy().reshape(*exact.shape[:-1], width // 2)
    start = FORMATS["q4"].scale_offset_bytes(width)
    scales = packed[:, start : start + 2 * groups].contiguous().numpy().view(np.float16)
    return data.copy(), scales.reshape(*exact.shape[:-1], groups).copy(), values


def spread(rows: Array) -> NDArray[np.float64]:
    """Each 32 elements times the orthogonal Hadamard matrix."""
    matrix = np.ones((1, 1))
    while len(matrix) < GROUP:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (rows.reshape(-1, GROUP).astype(np.float64) @ matrix / np.sqrt(GROUP)).reshape(rows.shape)


def expected_attention(
    shape: Heads,
    q: NDArray[np.float32],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    position: int,
    options: Mapping[str, Array] | None = None,
) -> NDArray[np.float64]:
    """Rows of consecutive tokens from `position` on. keys and values [kv_heads, context, width] of their sequence.

    `options` are the slopes and sinks that the kernel was given, if any.
    """
    group, given = shape.heads // shape.kv_heads, options or {}
    outputs = np.empty((len(q), shape.heads, shape.value_dim))
    for t, head in product(range(len(q)), range(shape.heads)):
        last = position + t
        seen = slice(max(0, last - shape.window + 1) if shape.window else 0, last + 1)
        query = q[t].reshape(shape.heads, -1)[head].astype(np.float64)
        scores = keys[head // group, seen] @ query * SCALE
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        if "slopes" in given:
            scores = scores + float(given["slopes"][head]) * (np.arange(seen.start, seen.stop) - last)
        # A sink is a key with the value 0.
        scores = np.append(scores, float(given["sinks"][head]) if "sinks" in given else -np.inf)
        weights = np.exp(scores - scores.max())
        outputs[t, head] = weights[:-1] / weights.sum() @ values[head // group, seen]
    return outputs.reshape(len(q), -1)
