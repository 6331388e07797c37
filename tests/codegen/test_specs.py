"""Every spec has a body for host and GPU, and both take the arguments that it declares."""

from itertools import product
from typing import Any

import pytest

from picompile_codegen import cpu, cuda, specs
from picompile_codegen.signs import sign_row_bytes
from picompile_codegen.specs import (
    AddSpec,
    AttentionSpec,
    BorrowCacheSpec,
    CacheWriteSpec,
    CopyWordsSpec,
    CountedFfnSpec,
    CountedSendMaskSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    FfnSpec,
    JoinColumnsSpec,
    KernelArgument,
    KernelSpec,
    LayerNormSpec,
    LendCacheSpec,
    LinearAddSpec,
    LinearSpec,
    PackageSpec,
    PingPongSpec,
    PredictLowRankSpec,
    PredictSignsSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    RmsNormSpec,
    RotarySpec,
    SendMaskSpec,
    SendSpec,
    SignalSpec,
    SparseLinearSpec,
    SumNormSpec,
    TakeLastSpec,
    TopLogitsSpec,
    UploadSpec,
    WaitSpec,
)

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
KV_DTYPES = ("float16", "float32", "q8")
MODES = (("one", 1), ("chunk", 13), ("sequences", 3))
ROWS = (1, 13)
# Only the host calls these, and only a GPU that one.
HOST_ONLY: set[type[KernelSpec]] = {LendCacheSpec, SignalSpec, WaitSpec}
GPU_ONLY: set[type[KernelSpec]] = {CountedSendMaskSpec, LinearAddSpec, PingPongSpec, SumNormSpec}

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
    options = [
        {"softcap": 30.0},
        {"slopes": True},
        {"sinks": True},
        {"softcap": 50.0, "slopes": True, "sinks": True},
    ]
    changed = with_modes([{**each, **option} for each in cached[:1] for option in options], sequences=4)
    return [*reading, *extending, *changed, *with_modes(cached[:1], sequences=1)]


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
        {"gated": True, "activation": "relu2", "up_activation": "identity", "biases": "", "squares": True},
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
    return [*found, *with_limits(found)]


def with_limits(variants: list[Parameters]) -> list[Parameters]:
    """Limits of each kind, of both, and of gates that decide in place of a threshold; in one format."""
    found = []
    for each, (gate, output) in product(variants, ((True, False), (False, True), (True, True))):
        if (
            each["activation"] in ("silu", "gelu", "fatrelu(0.25)")
            and each["format"] == "f16"
            and each["gated"] >= gate
        ):
            found.append({**each, "gate_limits": gate, "output_limits": output})
    silu = [each for each in found if each["activation"] == "silu" and each["kind"] == "dense" and each["gate_limits"]]
    return [*found, *({**each, "kind": "exact"} for each in silu)]


def norms_behind(dim: int, rows: int) -> list[Any]:
    """No norm, and each kind of one, with and without a bias."""
    with_bias = [LayerNormSpec(dim, rows, 1e-5, weight=True, bias=bias) for bias in (False, True)]
    return [None, RmsNormSpec(dim, rows, 1e-5), *with_bias]


VARIANTS: dict[type[KernelSpec], list[Parameters]] = {
    AddSpec: grid(dim=(96, 99), rows=ROWS),
    AttentionSpec: attentions(),
    CacheWriteSpec: [
        each
        for sequences in (1, 4)
        for each in with_modes(
            grid(kv_heads=(3,), head_dim=(20, 72), context=(50,), kv_dtype=KV_DTYPES), sequences=sequences
        )
    ],
    CopyWordsSpec: grid(words=(8, 300)),
    CountedFfnSpec: ffns(),
    CountedSendMaskSpec: grid(dim=(96,), neurons=(200,), columns=(60,), rows=ROWS, in_words=(False, True)),
    UploadSpec: grid(size=(64, 5000)),
    DivideByRmsSpec: grid(dim=(96, 99), rows=ROWS, neurons=(77,), eps=(1e-5, 1e-6), bias=(False, True)),
    ElementwiseSpec: [
        *grid(dim=(96, 99), rows=ROWS, inputs=("rtv",), expression=("t0 = mul(x0, x1); add(t0, x2)",)),
        *grid(dim=(96,), rows=(1,), inputs=("rv", "rr"), expression=("mul(x0, x1)", "mul(x1, x0)", "mul(x0, 2.0)")),
    ],
    EmbeddingSpec: grid(format=FORMATS, vocab=(50,), dim=(96, 100), rows=ROWS, offset=(0, 2)),
    FfnSpec: ffns(),
    LayerNormSpec: grid(dim=(96, 99), rows=ROWS, eps=(1e-5,), weight=(False, True), bias=(False, True), groups=(1, 3)),
    TopLogitsSpec: grid(vocab=(37, 300, 3000), rows=ROWS),
    LinearAddSpec: [
        {"linear": LinearSpec(form, 64, 72, rows=1, bias=bias), "norm": norm}
        for form, bias, norm in product(FORMATS, (False, True), norms_behind(64, 1))
    ],
    SumNormSpec: [
        {"dim": 96, "rows": rows, "terms": terms, "norm": norm, "received": received, "counted": counted}
        for rows, terms, (received, counted) in product(ROWS, (2, 4), ((False, False), (True, False), (True, True)))
        for norm in norms_behind(96, rows)
    ],
    LinearSpec: grid(format=FORMATS, n=(64, 251), k=(72, 100), rows=ROWS, bias=(False, True)),
    SparseLinearSpec: [
        {**each, "rows": rows, "rowwise": rowwise}
        for each in grid(format=FORMATS, n=(64, 251), k=(72,), bias=(False, True))
        for rows, rowwise in ((1, False), (13, False), (13, True))
    ],
    PredictLowRankSpec: grid(
        formats=(("f16", "f16"), ("q8", "q4"), ("q4", "q8"), ("q6", "q4m")),
        neurons=(77,), rank=(5, 40), dim=(72,), relu=(False, True), rows=(1, 7),
    ),
    PredictSignsSpec: [
        {"neurons": 50, "dim": dim, "row_bytes": sign_row_bytes(dim), "rows": rows}
        for dim, rows in product((13, 256, 257), (1, 7))
    ],
    LendCacheSpec: grid(
        kv_heads=(1, 3), width=(1, 20), dtype=("float16", "float32", "int8"), context=(50,), sequences=(1, 4)
    ),
    BorrowCacheSpec: grid(kv_heads=(1, 3), width=(1, 3, 20), dtype=("float16", "float32", "int8"), context=(50, 51)),
    JoinColumnsSpec: grid(widths=((64, 7), (64, 64, 32)), rows=ROWS),
    ReceiveSpec: grid(dim=(96, 99), rows=ROWS, counted=(False, True)),
    ReceiveMaskSpec: grid(neurons=(77, 200), rows=ROWS),
    RmsNormSpec: grid(dim=(96, 99), rows=ROWS, eps=(1e-5, 1e-6), groups=(1, 3)),
    RotarySpec: with_modes(grid(heads=(3,), head_dim=(20, 32), context=(50,))),
    SendSpec: grid(dim=(96, 99), rows=ROWS),
    SendMaskSpec: grid(dim=(96,), neurons=(200,), columns=(55, 60), rows=ROWS),
    TakeLastSpec: grid(dim=(96, 99), rows=ROWS),
    PingPongSpec: [{}],
    SignalSpec: [{}],
    WaitSpec: [{}],
}  # fmt: skip


def declared(arguments: tuple[KernelArgument, ...]) -> tuple[KernelArgument, ...]:
    """Return the arguments that the caller passes: all but scratch memory and tickets."""
    return tuple(argument for argument in arguments if argument.access not in ("scratch", "tickets"))


def test_every_spec_has_its_bodies() -> None:
    exported = (getattr(specs, name) for name in specs.__all__)
    found = {each for each in exported if isinstance(each, type) and issubclass(each, KernelSpec)}
    found -= {KernelSpec, PackageSpec}
    assert set(cpu.BODIES) == found - GPU_ONLY
    assert set(cuda.BODIES) == found - HOST_ONLY
    assert set(VARIANTS) == found


@pytest.mark.parametrize("kind", VARIANTS, ids=lambda kind: kind.__name__)
def test_bodies_take_the_arguments_of_their_spec(kind: type[KernelSpec]) -> None:
    names = set()
    for parameters in VARIANTS[kind]:
        spec = kind(**parameters)
        bodies = [module for module in (cpu, cuda) if kind in module.BODIES]
        if isinstance(spec, CountedFfnSpec) and not spec.is_masked:
            bodies.remove(cpu)
        written = [module.write_kernel(spec) for module in bodies]
        for kernel in written:
            assert kernel.name == spec.name
            assert declared(kernel.arguments) == spec.arguments, parameters
            assert kernel.params[0] == "step"
            parameter_names = [str(each.name) for each in kernel.prim_func.params]
            assert parameter_names == [name.replace(".", "_") for name in kernel.params], parameters
        if len(written) == 2:
            on_host, on_gpu = written
            assert (on_gpu.positions, on_gpu.slots) == (on_host.positions, on_host.slots), parameters
            assert on_gpu.tokens == on_host.tokens or parameters["rows"] == 1, parameters
        names.add(spec.name)
    assert len(names) == len(VARIANTS[kind]), "different kernels have the same name"
