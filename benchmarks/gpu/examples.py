"""The example of every case of a pack, by the name of its kernel's builder; here all that reads no packed matrix."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import examples_matrix as matrix
from benchmarks.gpu.example import STEP_NUMBER, Example, Maker, numpy_of
from benchmarks.gpu.weights import Array
from picompile_passes.formats import GROUP

_FLAG_WORDS = 16


def example(op: str, parameters: Mapping[str, Any], seed: int, device: str, share: float = 1.0) -> Example:
    """The example of a case, `share` of whose neurons fire. `device` is PyTorch's."""
    return _MAKERS[op](Maker(parameters, np.random.default_rng(seed), device, share))


def rms_norm(make: Maker) -> Example:
    p = make.parameters
    x, weight = make.floats("x", make.tokens, p["dim"]), make.floats("weight", p["dim"])
    y = functional.rms_norm(x, (p["dim"],), weight, p["eps"])
    return Example(make.inputs, {"y": numpy_of(y)}, tokens=make.tokens)


def layer_norm(make: Maker) -> Example:
    p = make.parameters
    x = make.floats("x", make.tokens, p["dim"], offset=3.0)
    weight = make.floats("weight", p["dim"]) if p["weight"] else None
    bias = make.floats("bias", p["dim"]) if p["bias"] else None
    y = functional.layer_norm(x, (p["dim"],), weight, bias, p["eps"])
    return Example(make.inputs, {"y": numpy_of(y)}, tokens=make.tokens)


def add(make: Maker) -> Example:
    dim = make.parameters["dim"]
    y = make.floats("a", make.tokens, dim) + make.floats("b", make.tokens, dim)
    return Example(make.inputs, {"y": numpy_of(y)}, tokens=make.tokens)


def sum_norm(make: Maker) -> Example:
    """Return an example of a sum with its norm. What the host adds is there already."""
    p, received = make.parameters, make.parameters.get("received", False)
    names = [*(f"x{number}" for number in range(p["terms"] - received)), *(["source"] if received else [])]
    y = torch.stack([make.floats(name, make.tokens, p["dim"]) for name in names]).sum(dim=0)
    shared: tuple[str, ...] = ()
    if received:
        _flag(make, "flag", STEP_NUMBER)
        _flag(make, "abandoned", 0)
        make.inputs["count"] = np.array([3], np.int32)
        shared = ("source", "flag", "abandoned")
    normed = functional.rms_norm(y, (p["dim"],), make.floats("norm_weight", p["dim"]), p["eps"])
    return Example(make.inputs, {"y": numpy_of(y), "normed": numpy_of(normed)}, shared=shared, tokens=make.tokens)


def take_last(make: Maker) -> Example:
    x = make.floats("x", make.tokens, make.parameters["dim"])
    return Example(make.inputs, {"y": numpy_of(x[-1:])}, tokens=make.tokens)


def join_columns(make: Maker) -> Example:
    parts = [make.floats(f"x{number}", make.tokens, width) for number, width in enumerate(make.parameters["widths"])]
    return Example(make.inputs, {"y": numpy_of(torch.cat(parts, dim=1))}, tokens=make.tokens)


def top_logits(make: Maker) -> Example:
    """Each score is there several times, so that it matters which of them is first."""
    p = make.parameters
    logits = make.rng.integers(-2000, 2000, (make.tokens, p["vocab"])).astype(np.float32)
    make.inputs["logits"] = logits
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :64].astype(np.int32)
    expected = {"scores": np.take_along_axis(logits, ids, axis=1), "ids": ids}
    return Example(make.inputs, expected, shared=("scores", "ids"), tokens=make.tokens)


def send(make: Maker) -> Example:
    """Return an example of `send`. With a mask, the neurons of a table are sent too; a third of them fire."""
    p = make.parameters
    x, flag = make.floats("x", make.tokens, p["dim"]), _flag(make, "flag", STEP_NUMBER - 1)
    expected = {"out": numpy_of(x), "flag": flag}
    if "neurons" in p:
        mask = (make.rng.random((make.tokens, p["neurons"])) < 1 / 3).astype(np.uint8)
        table = make.rng.permutation(p["neurons"])[: p.get("count", p["columns"])].astype(np.int32)
        make.inputs |= {"mask": mask, "table": table}
        expected |= {"out_mask": mask[:, table], "count": np.array([mask[:, table].sum()], np.int32)}
    if "count" in p:
        make.inputs["columns"] = np.array([p["count"]], np.int32)
        expected["out_mask"] = expected["out_mask"].reshape(-1)
    return Example(make.inputs, expected, shared=("out", "out_mask", "flag"), tokens=make.tokens)


def receive(make: Maker) -> Example:
    """Return an example of `receive`. The stream or mask to receive is there already, since nobody sends."""
    p = make.parameters
    if "neurons" in p:
        make.inputs["source"] = make.rng.integers(0, 2, (make.tokens, p["neurons"])).astype(np.uint8)
    else:
        make.floats("source", make.tokens, p["dim"])
    _flag(make, "flag", STEP_NUMBER)
    _flag(make, "abandoned", 0)
    if p.get("counted"):
        make.inputs["count"] = np.array([3], np.int32)
    shared = ("source", "flag", "abandoned")
    return Example(make.inputs, {"y": make.inputs["source"]}, shared=shared, tokens=make.tokens)


def borrow_cache(make: Maker) -> Example:
    """Return an example of `borrow_cache`: all positions but the last, of whole words."""
    p = make.parameters
    item_bytes = np.dtype(p["dtype"]).itemsize
    source = make.rng.integers(0, 256, (p["kv_heads"], p["context"] * p["width"] * item_bytes)).astype(np.uint8)
    # Bytes of numbers, since infinities and what is none compare in ways of their own.
    source[:, 1::2] &= 0x3F
    make.inputs["source"] = source.view(p["dtype"])
    _flag(make, "flag", STEP_NUMBER)
    _flag(make, "abandoned", 0)
    position = p["context"] - 1
    expected = make.inputs["source"].copy()
    expected[:, position * p["width"] :].view(np.uint8)[:] = 255
    moved = p["kv_heads"] * position * p["width"] * item_bytes
    shared = ("source", "flag", "abandoned")
    return Example(make.inputs, {"y": expected}, moved, ("source",), shared=shared, position=position)


def copy_words(make: Maker) -> Example:
    source = make.rng.integers(-(2**31), 2**31, make.parameters["words"]).astype(np.int32)
    make.inputs["source"] = source
    return Example(make.inputs, {"y": source}, shared=("source",))


def upload(make: Maker) -> Example:
    source = make.rng.integers(0, 256, make.parameters["size"], np.uint8)
    make.inputs["source"] = source
    return Example(make.inputs, {"y": source}, len(source), ("source",), shared=("source",))


def _flag(make: Maker, name: str, number: int) -> Array:
    """A flag that was set in step `number`; what it is after this one."""
    before, after = np.full(_FLAG_WORDS, -1, np.int32), np.full(_FLAG_WORDS, -1, np.int32)
    before[0], after[0] = number, STEP_NUMBER
    make.inputs[name] = before
    return after


def rotary(make: Maker) -> Example:
    p, position = make.parameters, 11
    heads, width = p["heads"], p["head_dim"]
    x = make.floats("x", make.tokens, heads * width).reshape(make.tokens, heads, width)
    _angles(make, p["context"], width)
    places = np.arange(position, position + make.tokens)
    y = _turned(make, x, places).reshape(make.tokens, -1)
    return Example(make.inputs, {"y": numpy_of(y)}, tokens=make.tokens, position=position)


def cache_write(make: Maker) -> Example:
    p, position = make.parameters, 11
    shape = (make.tokens, p["kv_heads"], p["head_dim"])
    make.floats("x", make.tokens, p["kv_heads"] * p["head_dim"])
    stored = _stored(make.inputs["x"].reshape(shape), "cache", p["kv_dtype"])
    expected = {}
    for name, rows in stored.items():
        # What is not written stays as it was: all bits of it are ones.
        whole = np.full((1, shape[1], p["context"], rows.shape[-1]), 255, np.uint8).repeat(rows.itemsize, -1)
        whole = whole.view(rows.dtype)
        whole[0, :, position : position + make.tokens] = rows.transpose(1, 0, 2)
        expected[name] = whole
    return Example(make.inputs, expected, tokens=make.tokens, position=position)


def attention(make: Maker) -> Example:
    """The last position of the context, or a chunk that ends three before it."""
    p, tokens = make.parameters, make.tokens
    one = p["rows"] == 1
    position = p["context"] - (1 if one else tokens + 3)
    heads, kv_heads, width = p["heads"], p["kv_heads"], p["head_dim"]
    filled = position if p["extend"] else position + tokens
    sides = [_cache(make, f"{side}_cache", filled) for side in "kv"]
    q = make.floats("q", tokens, heads * width).reshape(tokens, heads, width)
    places = np.arange(position, position + tokens)
    if p["extend"]:
        new = [make.floats(side, tokens, kv_heads * width).reshape(tokens, kv_heads, width) for side in "kv"]
        if p["turn"]:
            _angles(make, p["context"], width)
            q, new[0] = _turned(make, q, places), _turned(make, new[0], places)
        rounded = [
            _meaning(_stored(numpy_of(each).astype(np.float32), "cache", p["kv_dtype"]), "cache") for each in new
        ]
        sides = [
            torch.cat([cache, make.wide(rows.transpose(1, 0, 2))], dim=1)
            for cache, rows in zip(sides, rounded, strict=True)
        ]
    keys, values = (side.repeat_interleave(heads // kv_heads, dim=0) for side in sides)
    scores = torch.einsum("thd,hpd->htp", q, keys) * p["scale"]
    hidden = torch.arange(keys.shape[1])[None] > torch.from_numpy(places)[:, None]
    scores = scores.masked_fill(hidden.to(make.device)[None], -torch.inf)
    y = torch.einsum("htp,hpd->thd", scores.softmax(-1), values).reshape(tokens, -1)
    row_bytes = {"float16": 2 * width, "float32": 4 * width, "q8": width + 2 * -(-width // GROUP)}[p["kv_dtype"]]
    moved = 2 * kv_heads * (position + tokens) * row_bytes
    rotating = tuple(name for name in make.inputs if "_cache" in name)
    return Example(make.inputs, {"y": numpy_of(y)}, moved, rotating, tokens=tokens, position=position)


def _angles(make: Maker, context: int, width: int) -> None:
    angles = np.arange(context)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))
    make.inputs |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def _turned(make: Maker, x: Tensor, places: Array) -> Tensor:
    """x [tokens, heads, width] by the angles of its positions: element i with element i + width / 2."""
    cos, sin = (make.wide(make.inputs[name][places])[:, None] for name in ("cos", "sin"))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _cache(make: Maker, name: str, filled: int) -> Tensor:
    """A cache with so many positions, the rest NaN, or -1 as bytes: what it stands for, [kv_heads, filled, width]."""
    p = make.parameters
    rows = make.rng.uniform(-1, 1, (p["kv_heads"], filled, p["head_dim"])).astype(np.float32)
    stored = _stored(rows, name, p["kv_dtype"])
    for argument, values in stored.items():
        whole = np.full((1, p["kv_heads"], p["context"], values.shape[-1] * values.itemsize), 255, np.uint8)
        whole = whole.view(values.dtype)
        whole[0, :, :filled] = values
        make.inputs[argument] = whole
    return make.wide(_meaning(stored, name))


def _stored(rows: Array, name: str, kv_dtype: str) -> dict[str, Array]:
    """Return float32 rows [..., width] as a cache stores them, by argument; q8 in float32, as the kernel does."""
    if kv_dtype != "q8":
        return {name: rows.astype(kv_dtype)}
    width = rows.shape[-1]
    groups = np.zeros((*rows.shape[:-1], -(-width // GROUP) * GROUP), np.float32)
    groups[..., :width] = rows
    groups = groups.reshape(*rows.shape[:-1], -1, GROUP)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    data = np.clip(np.rint(groups * inverse), -127, 127).astype(np.int8)
    return {name: data.reshape(*rows.shape[:-1], -1)[..., :width], f"{name}_scales": scales}


def _meaning(stored: dict[str, Array], name: str) -> Array:
    """The numbers that rows of a cache stand for, float64."""
    values = stored[name].astype(np.float64)
    if f"{name}_scales" not in stored:
        return values
    return values * stored[f"{name}_scales"].astype(np.float64).repeat(GROUP, -1)[..., : values.shape[-1]]


_MAKERS: Mapping[str, Callable[[Maker], Example]] = {
    "linear": matrix.linear,
    "linear_add": matrix.linear_add,
    "whole_ffn": matrix.whole_ffn,
    "ffn": matrix.ffn,
    "counted_ffn": matrix.counted_ffn,
    "embedding": matrix.embedding,
    "predict_low_rank": matrix.low_rank,
    "predict_signs": matrix.signs,
    "attention": attention,
    "borrow_cache": borrow_cache,
    "cache_write": cache_write,
    "rotary": rotary,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "add": add,
    "join_columns": join_columns,
    "take_last": take_last,
    "top_logits": top_logits,
    "send": send,
    "send_mask": send,
    "counted_send_mask": send,
    "receive": receive,
    "receive_mask": receive,
    "sum_norm": sum_norm,
    "copy_words": copy_words,
    "upload": upload,
}
