"""A program names the same kernels with the same arguments, whichever device they are for."""

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from picompile_codegen import cpu as kernels
from picompile_codegen import cuda
from picompile_codegen.cpu import KernelArgument
from picompile_codegen.signs import sign_row_bytes

FORMATS = ("f16", "q8", "q4")
KV_DTYPES = ("float16", "float32", "q8")
MODES = (("one", 1), ("chunk", 13), ("batch", 3))
ROWS = (1, 13)
# Only the host calls these.
OF_THE_HOST = {"wait", "signal"}

Parameters = dict[str, Any]


def grid(**choices: tuple[Any, ...]) -> list[Parameters]:
    """All combinations."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def with_modes(variants: list[Parameters], **sequences: int) -> list[Parameters]:
    return [{**each, "mode": mode, "rows": rows, **sequences} for each in variants for mode, rows in MODES]


def attentions() -> list[Parameters]:
    """Heads of one width and of two, few with a long context, with and without a window; what extends the cache."""
    shapes = [
        {"heads": 3, "kv_heads": 3, "head_dim": 24, "value_dim": 24, "context": 50, "window": 0},
        {"heads": 6, "kv_heads": 2, "head_dim": 20, "value_dim": 12, "context": 50, "window": 9},
        {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16, "context": 1100, "window": 0},
    ]
    cached = [{**shape, **kv} for shape in shapes for kv in grid(kv_dtype=KV_DTYPES, scale=(0.3,))]
    reading = with_modes(cached, sequences=4)
    extending = [
        {**each, "extend": True, "turn": turn} for each in reading for turn in (False, True) if each["mode"] != "chunk"
    ]
    return [*reading, *extending, *with_modes(cached[:1], sequences=1)]


def ffns() -> list[Parameters]:
    """Gated and not; with all biases, some and none; and parts of a block, which have a table."""
    sizes = {"neurons": 77, "dim": 72}
    blocks = [
        {"gated": True, "activation": "relu", "up_activation": "identity", "biases": ""},
        {"gated": True, "activation": "relu", "up_activation": "relu", "biases": ""},
        {"gated": True, "activation": "fatrelu(0.25)", "up_activation": "identity", "biases": "gud"},
        {"gated": True, "activation": "silu", "up_activation": "identity", "biases": ""},
        {"gated": False, "activation": "relu2", "up_activation": "identity", "biases": ""},
        {"gated": False, "activation": "gelu", "up_activation": "identity", "biases": "ud"},
    ]
    kinds = [
        *({"kind": kind, "mask_columns": None} for kind in ("dense", "exact", "masked")),
        {"kind": "masked", "mask_columns": 100},
    ]
    found = []
    for block, kind, layout in product(blocks, kinds, grid(format=FORMATS, rows=ROWS)):
        if kind["kind"] == "exact" and block["activation"] in ("silu", "gelu"):
            continue  # no threshold of these says which neurons stay silent
        if layout["format"] != "f16" and block["activation"] != "fatrelu(0.25)":
            continue  # the format changes nothing but two arguments, which one block shows
        present = {f"{name}_bias": name[0] in block["biases"] for name in ("gate", "up", "down")}
        rest = {name: value for name, value in block.items() if name != "biases"}
        found.append({**sizes, **rest, **kind, **layout, **present})
    return found


VARIANTS: dict[str, list[Parameters]] = {
    "add": grid(dim=(96, 99), rows=ROWS),
    "attention": attentions(),
    "cache_write": [
        each
        for sequences in (1, 4)
        for each in with_modes(
            grid(kv_heads=(3,), head_dim=(20, 72), context=(50,), kv_dtype=KV_DTYPES), sequences=sequences
        )
    ],
    "copy_words": grid(words=(8, 300)),
    "embedding": grid(format=FORMATS, vocab=(50,), dim=(96, 100), rows=ROWS, offset=(0, 2)),
    "ffn": ffns(),
    "layer_norm": grid(dim=(96, 99), rows=ROWS, eps=(1e-5,), weight=(False, True), bias=(False, True)),
    "leading_logits": grid(vocab=(37, 300, 3000), rows=ROWS),
    "linear": grid(format=FORMATS, n=(64, 251), k=(72, 100), rows=ROWS, bias=(False, True)),
    "predict_low_rank": grid(
        formats=(("f16", "f16"), ("q8", "q4"), ("q4", "q8")),
        neurons=(77,), rank=(5, 40), dim=(72,), relu=(False, True), rows=(1, 7),
    ),
    "predict_signs": [
        {"neurons": 50, "dim": dim, "row_bytes": sign_row_bytes(dim), "rows": rows}
        for dim, rows in product((13, 256, 257), (1, 7))
    ],
    "receive": grid(dim=(96, 99), rows=ROWS, counted=(False, True)),
    "receive_mask": grid(neurons=(77, 200), rows=ROWS),
    "rms_norm": grid(dim=(96, 99), rows=ROWS, eps=(1e-5, 1e-6)),
    "rotary": with_modes(grid(heads=(3,), head_dim=(20, 32), context=(50,))),
    "send": grid(dim=(96, 99), rows=ROWS),
    "send_mask": grid(dim=(96,), neurons=(200,), columns=(55, 60), rows=ROWS),
    "take_last": grid(dim=(96, 99), rows=ROWS),
}  # fmt: skip


def builders(name: str) -> tuple[Callable[..., kernels.Kernel], Callable[..., cuda.CudaKernel]]:
    return getattr(kernels, name), getattr(cuda, name)


def declared(arguments: tuple[KernelArgument, ...]) -> list[KernelArgument]:
    """What the caller gives: all but scratch."""
    return [argument for argument in arguments if not argument.scratch]


def test_every_kernel_is_compared() -> None:
    functions = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    assert set(VARIANTS) == functions - OF_THE_HOST


@pytest.mark.parametrize("name", VARIANTS)
def test_same_parameters(name: str) -> None:
    """Names, defaults and types."""
    on_host, on_device = (inspect.signature(builder).parameters for builder in builders(name))
    assert on_host == on_device


@pytest.mark.parametrize("name", VARIANTS)
def test_same_names_and_arguments(name: str) -> None:
    on_host, on_device = builders(name)
    names = set()
    for parameters in VARIANTS[name]:
        expected, found = on_host(**parameters), on_device(**parameters)
        assert found.name == expected.name
        assert declared(found.arguments) == declared(expected.arguments), parameters
        assert (found.positions, found.slots) == (expected.positions, expected.slots), parameters
        assert found.tokens == expected.tokens or parameters["rows"] == 1, parameters
        assert found.params[0] == "step" and found.grids
        names.add(found.name)
    assert len(names) == len(VARIANTS[name]), "different kernels have the same name"
