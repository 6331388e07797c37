"""Examples of kernels that read nothing large: norms, additions, and what crosses from one device to the other."""

import numpy as np
from _gpu_example import STEP_NUMBER, Example, Maker, numpy_of
from _gpu_formats import Array
from torch.nn import functional

_FLAG_WORDS = 16


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


def take_last(make: Maker) -> Example:
    x = make.floats("x", make.tokens, make.parameters["dim"])
    return Example(make.inputs, {"y": numpy_of(x[-1:])}, tokens=make.tokens)


def leading_logits(make: Maker) -> Example:
    """Each score is there several times, so that it matters which of them is first."""
    p = make.parameters
    logits = make.rng.integers(-2000, 2000, (make.tokens, p["vocab"])).astype(np.float32)
    make.inputs["logits"] = logits
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :64].astype(np.int32)
    expected = {"scores": np.take_along_axis(logits, ids, axis=1), "ids": ids}
    return Example(make.inputs, expected, shared=("scores", "ids"), tokens=make.tokens)


def send(make: Maker) -> Example:
    x = make.floats("x", make.tokens, make.parameters["dim"])
    flag = _flag(make, "flag", STEP_NUMBER - 1)
    return Example(make.inputs, {"out": numpy_of(x), "flag": flag}, shared=("out", "flag"), tokens=make.tokens)


def send_mask(make: Maker) -> Example:
    """A third of the mask's neurons fire."""
    p = make.parameters
    x = make.floats("x", make.tokens, p["dim"])
    mask = (make.rng.random((make.tokens, p["neurons"])) < 1 / 3).astype(np.uint8)
    table = make.rng.permutation(p["neurons"])[: p["columns"]].astype(np.int32)
    flag = _flag(make, "flag", STEP_NUMBER - 1)
    make.inputs |= {"mask": mask, "table": table}
    sent = mask[:, table]
    expected = {"out": numpy_of(x), "out_mask": sent, "count": np.array([sent.sum()], np.int32), "flag": flag}
    return Example(make.inputs, expected, shared=("out", "out_mask", "flag"), tokens=make.tokens)


def receive(make: Maker) -> Example:
    """What is received is there already: nobody sends."""
    p = make.parameters
    source = make.floats("source", make.tokens, p["dim"])
    _flag(make, "flag", STEP_NUMBER)
    _flag(make, "abandoned", 0)
    if p["counted"]:
        make.inputs["count"] = np.array([3], np.int32)
    shared = ("source", "flag", "abandoned")
    return Example(make.inputs, {"y": numpy_of(source)}, shared=shared, tokens=make.tokens)


def receive_mask(make: Maker) -> Example:
    source = make.rng.integers(0, 2, (make.tokens, make.parameters["neurons"])).astype(np.uint8)
    make.inputs["source"] = source
    _flag(make, "flag", STEP_NUMBER)
    _flag(make, "abandoned", 0)
    return Example(make.inputs, {"y": source}, shared=("source", "flag", "abandoned"), tokens=make.tokens)


def copy_words(make: Maker) -> Example:
    source = make.rng.integers(-(2**31), 2**31, make.parameters["words"]).astype(np.int32)
    make.inputs["source"] = source
    return Example(make.inputs, {"y": source}, shared=("source",))


def _flag(make: Maker, name: str, number: int) -> Array:
    """A flag that was set in step `number`; what it is after this one."""
    before, after = np.full(_FLAG_WORDS, -1, np.int32), np.full(_FLAG_WORDS, -1, np.int32)
    before[0], after[0] = number, STEP_NUMBER
    make.inputs[name] = before
    return after
