"""Examples of kernels that read packed matrices: products, feed-forward blocks, embeddings, predictors."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu.example import Example, Maker, numpy_of
from benchmarks.gpu.weights import Array
from picompile_passes.formats import FORMATS

# Far beyond what a product of these blocks comes to: a bias of so much decides alone.
_DECIDED = 6.0
# So many masks take turns where a block is timed.
_MASKS = 64


def linear(make: Maker) -> Example:
    p = make.parameters
    x = make.floats("x", make.tokens, p["k"])
    w = make.matrix("w", p["format"], p["n"], p["k"], panels=p.get("panels", False))
    bias = make.floats("bias", p["n"]) if p["bias"] else None
    y = functional.linear(x, w.double(), bias)
    return Example(make.inputs, {"y": numpy_of(y)}, make.inputs["w"].nbytes, ("w",), tokens=make.tokens)


def linear_add(make: Maker) -> Example:
    p = make.parameters
    x, added = make.floats("x", 1, p["k"]), make.floats("added", 1, p["n"])
    w = make.matrix("w", p["format"], p["n"], p["k"], panels=p.get("panels", False))
    y = added + functional.linear(x, w.double(), make.floats("bias", p["n"]) if p["bias"] else None)
    normed = functional.rms_norm(y, (p["n"],), make.floats("norm_weight", p["n"]), p["eps"])
    expected = {"y": numpy_of(y), "normed": numpy_of(normed)}
    return Example(make.inputs, expected, make.inputs["w"].nbytes, ("w",), tokens=1)


def ffn(make: Maker) -> Example:
    """A bias wakes neurons: all in a masked block, in `exact` just those that are to fire, half of them in `dense`."""
    p, inputs = make.parameters, make.inputs
    neurons, dim, kind, gated = p["neurons"], p["dim"], p["kind"], p["gated"]
    x, parts = make.floats("x", make.tokens, dim), 3 if gated else 2
    count = neurons // 2 if kind == "dense" else round(make.share * neurons)
    first_bias = np.full(neurons, _DECIDED, np.float32)
    if kind != "masked":
        first_bias[~make.chosen(count, (neurons,))] *= -1
    inputs["gate_bias" if gated else "up_bias"] = first_bias
    bias = make.wide(first_bias)
    bundled = make.matrix("neuron_w", p["format"], neurons * (parts - (kind == "exact")), dim)
    if kind == "exact":
        first = make.matrix("decide_w", p["format"], neurons, dim).double()
        up, down = bundled[0::2].double(), bundled[1::2].double()
    else:
        first, up, down = (bundled[part::parts].double() for part in (0, parts - 2, parts - 1))
    hidden = torch.relu(x @ first.T + bias)
    if gated:
        hidden = hidden * (x @ up.T)
    named = np.ones((make.tokens, neurons), bool)
    if kind == "masked":
        named = make.chosen(count, (make.tokens, neurons))
        _name(make, named)
        hidden = hidden * make.wide(named.astype(np.float64))
    fired = int((hidden != 0).sum())
    computed = fired if kind == "exact" else int(named.sum())
    inputs["stats"] = np.zeros(2, np.int64)
    counted = [0, 0] if p["rows"] > 1 and kind != "masked" else [computed, fired]
    row = FORMATS[p["format"]].row_bytes(dim)
    moved = {"masked": count * parts * row + neurons, "dense": neurons * parts * row}
    moved["exact"] = neurons * row + count * 2 * row
    expected = {"y": numpy_of(hidden @ down), "stats": np.array(counted)}
    rotating = ("neuron_w", "decide_w") if kind == "exact" else ("neuron_w",)
    is_whole = kind == "masked" and p.get("mask_columns") is None
    masks = make.chosen(count, (_MASKS, neurons)).astype(np.uint8) if is_whole else None
    return Example(inputs, expected, moved[kind], rotating, tokens=make.tokens, masks=masks)


def whole_ffn(make: Maker) -> Example:
    """A SwiGLU block whose matrices lie in panels."""
    p, inputs = make.parameters, make.inputs
    x, names = make.floats("x", make.tokens, p["dim"]), ("gate_w", "up_w", "down_w")
    inner = (p["neurons"], p["dim"])
    gate, up, down = (
        make.matrix(name, form, *shape, panels=True).double()
        for name, form, shape in zip(names, p["formats"], (inner, inner, inner[::-1]), strict=True)
    )
    hidden = functional.silu(x @ gate.T) * (x @ up.T)
    inputs["stats"] = np.zeros(2, np.int64)
    counted = [make.tokens * p["neurons"], int((hidden != 0).sum())] if p["counts"] else [0, 0]
    expected = {"y": numpy_of(hidden @ down.T), "stats": np.array(counted)}
    return Example(inputs, expected, sum(inputs[name].nbytes for name in names), names, tokens=make.tokens)


def counted_ffn(make: Maker) -> Example:
    """Return an example of `ffn` for a kernel that has room for more neurons."""
    count = make.parameters["count"]
    make.inputs["count"] = np.array([count], np.int32)
    return ffn(replace(make, parameters={**make.parameters, "neurons": count}))


def _name(make: Maker, named: Array) -> None:
    """The mask that names these neurons: of a part of a block, in the columns of its table."""
    columns = make.parameters.get("mask_columns")
    if columns is None:
        make.inputs["mask"] = named.astype(np.uint8)
        return
    table = make.rng.permutation(columns)[: named.shape[1]].astype(np.int32)
    mask = make.rng.integers(0, 2, (len(named), columns)).astype(np.uint8)
    mask[:, table] = named
    make.inputs |= {"mask": mask, "table": table}


def embedding(make: Maker) -> Example:
    p = make.parameters
    table = make.matrix("w", p["format"], p["vocab"], p["dim"], panels=p.get("panels", False))
    ids = make.rng.integers(0, p["vocab"] - p["offset"], make.tokens).astype(np.int32)
    make.inputs["ids"] = ids
    y = table[torch.from_numpy(ids).long().to(make.device) + p["offset"]]
    return Example(make.inputs, {"y": numpy_of(y)}, tokens=make.tokens)


def low_rank(make: Maker) -> Example:
    """The threshold is in the middle of the widest gap of the logits' middle half, so that no rounding decides."""
    p, (first, second) = make.parameters, make.parameters["formats"]
    x = make.floats("x", make.tokens, p["dim"])
    hidden = x @ make.matrix("fc1", first, p["rank"], p["dim"]).double().T
    hidden = torch.relu(hidden) if p["relu"] else hidden
    logits = hidden @ make.matrix("fc2", second, p["neurons"], p["rank"]).double().T + make.floats("bias", p["neurons"])
    ordered = np.sort(numpy_of(logits).ravel())
    quarter = len(ordered) // 4
    place = quarter + int(np.diff(ordered)[quarter : 3 * quarter].argmax())
    threshold = np.float32(ordered[place : place + 2].mean())
    make.inputs["threshold"] = np.array([threshold])
    moved = sum(make.inputs[name].nbytes for name in ("fc1", "fc2", "bias")) + p["neurons"]
    mask = numpy_of(logits > float(threshold)).astype(np.uint8)
    return Example(make.inputs, {"mask": mask}, moved, ("fc1", "fc2"), tokens=make.tokens)


def signs(make: Maker) -> Example:
    p, dim = make.parameters, make.parameters["dim"]
    make.floats("x", make.tokens, dim)
    bits = np.zeros((p["neurons"], p["row_bytes"] * 8), np.uint8)
    bits[:, :dim] = make.rng.integers(0, 2, (p["neurons"], dim))
    # Bit i of int32 word l of a block of 256 columns is its column 8 · i + l.
    words = bits.reshape(p["neurons"], -1, 32, 8).transpose(0, 1, 3, 2)
    make.inputs["signs"] = np.packbits(words, axis=-1, bitorder="little").reshape(p["neurons"], -1).view(np.int32)
    differing = (bits[None, :, :dim] != (make.inputs["x"] < 0)[:, None]).sum(-1)
    make.inputs["most"] = np.array([dim // 2], np.float32)
    moved = make.inputs["signs"].nbytes + p["neurons"]
    mask = (differing <= dim // 2).astype(np.uint8)
    return Example(make.inputs, {"mask": mask}, moved, ("signs",), tokens=make.tokens)
