"""Every spec has a body for host and GPU, and both take the arguments that it declares."""

from collections.abc import Callable
from importlib import import_module
from inspect import isabstract
from itertools import cycle, product
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from helpers.products import cover
from helpers.weight_formats import PANEL_FORMATS, ROW_FORMATS
from picompile_codegen import cpu, cuda, specs
from picompile_codegen.backend import find_bodies
from picompile_codegen.signs import sign_row_bytes
from picompile_codegen.specs import KernelArgument, KernelSpec, LayerNormSpec, LinearSpec, RmsNormSpec
from picompile_passes.errors import RegistryError

KV_DTYPES = ("float16", "float32", "q8")
ROWS = (1, 13)
CPU_BODIES, CUDA_BODIES = find_bodies(cpu.__name__), find_bodies(cuda.__name__)
BOTH = (False, True)
# Only the host calls these, and only a GPU those.
HOST_ONLY = {specs.ExpertsSpec, specs.LendCacheSpec, specs.RouteSpec, specs.SignalSpec, specs.WaitSpec}
GPU_ONLY = {specs.CountedSendMaskSpec, specs.LinearAddSpec, specs.PingPongSpec, specs.SumNormSpec}

CACHES = {"kv_heads": (1, 3), "context": (50,), "sequences": (1, 4)}
ACTIVATION_BYTES = {"activation_bytes": (1, 2)}
ROWWISE = {"rows": 13, "rowwise": True}
PREDICTED = (("f16", "f16"), ("q8", "q4"), ("q4", "q8"), ("q6", "q4m"))

Parameters = dict[str, Any]
MODES: list[Parameters] = [{"mode": "one", "rows": 1}, {"mode": "chunk", "rows": 13}, {"mode": "sequences", "rows": 3}]


def pairs(when: Callable[[Parameters], bool] = lambda _: True, **choices: Any) -> list[Parameters]:
    """Combinations that have every pair of two choices, or each of one. Mappings among choices are parameters each."""
    found = {}
    for place in product(*(range(len(values)) for values in choices.values())):
        found[place] = dict[str, Any]()
        for (name, values), index in zip(choices.items(), place, strict=True):
            found[place] |= values[index] if isinstance(values[index], dict) else {name: values[index]}
    places = [place for place, each in found.items() if when(each)]
    return [found[place] for place in cover(places, min(2, len(choices)))]


def attentions() -> list[Parameters]:
    """Heads of one width and of two, few with a long context, with and without a window; what extends the cache."""
    shapes: list[Parameters] = [
        {"heads": 3, "kv_heads": 3, "head_dim": 24, "value_dim": 24, "context": 50, "window": 0},
        {"heads": 6, "kv_heads": 2, "head_dim": 20, "value_dim": 12, "context": 50, "window": 9},
        {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16, "context": 1100, "window": 0},
    ]
    places = [{**mode, "extend": True, "turn": turn} for mode in (MODES[0], MODES[2]) for turn in BOTH]
    options = {"softcap": (0.0, 30.0), "slopes": BOTH, "sinks": BOTH, "sequences": (4, 1), "scale": (0.3,)}
    return pairs(shape=shapes, kv_dtype=KV_DTYPES, place=[*MODES, *places], **options)


def ffns() -> list[Parameters]:
    """Gated and not; with all biases, some and none; parts of a block, which have a table; limits of each kind."""
    blocks = [
        {"gated": True, "activation": "relu", "up_activation": "identity", "biases": ""},
        {"gated": True, "activation": "relu", "up_activation": "relu", "biases": ""},
        {"gated": True, "activation": "fatrelu(0.25)", "up_activation": "identity", "biases": "gud"},
        {"gated": True, "activation": "silu", "up_activation": "identity", "biases": ""},
        {"gated": False, "activation": "relu2", "up_activation": "identity", "biases": ""},
        {"gated": False, "activation": "gelu", "up_activation": "identity", "biases": "ud"},
        {"gated": True, "activation": "relu2", "up_activation": "identity", "biases": "", "squares": True},
    ]
    for block in blocks:
        biases = block.pop("biases")
        block |= {f"{name}_bias": name[0] in biases for name in ("gate", "up", "down")}
    kinds = [
        *({"kind": kind, "mask_columns": None} for kind in ("dense", "exact", "masked")),
        {"kind": "masked", "mask_columns": 100},
    ]

    def is_block(each: Parameters) -> bool:
        """Whether an exact block has something that says which neurons stay silent, and a limited gate is there."""
        dense = each["activation"] in ("silu", "gelu") and not each["gate_limits"]
        return (each["kind"] != "exact" or not dense) and each["gated"] >= each["gate_limits"]

    limits = {"gate_limits": BOTH, "output_limits": BOTH}
    layout = {"format": ROW_FORMATS, "rows": ROWS, "neurons": (77,), "dim": (72,)}
    return pairs(is_block, block=blocks, kinds=kinds, **layout, **limits)


def experts_in_bundles() -> list[Parameters]:
    """Gated and not, with biases of experts and without, for a token, a prompt, and several sequences."""
    blocks = [
        {"gated": True, "activation": "relu", "gate_bias": False, "up_bias": False},
        {"gated": False, "activation": "relu2", "gate_bias": False, "up_bias": True},
        {"gated": True, "activation": "fatrelu(0.25)", "gate_bias": True, "up_bias": True},
    ]
    experts = [{"experts": 7, "chosen": 2}, {"experts": 11, "chosen": 3}]
    layout = {"format": ROW_FORMATS, "neurons": (77,), "dim": (72,), "up_activation": ("identity",)}
    rows = [{"rows": 1}, {"rows": 13}, ROWWISE]
    kinds, biases = ("dense", "exact", "masked"), {"down_bias": BOTH, "expert_bias": BOTH}

    def is_block(each: Parameters) -> bool:
        return each["kind"] != "masked" or "rowwise" not in each

    return pairs(is_block, block=blocks, of=experts, kind=kinds, **layout, step=rows, **biases)


def whole_blocks() -> list[Parameters]:
    """Gated and not, each with formats of its own and with one; with all biases, some and none."""
    three, two = (("q4",) * 3, ("q4_k", "q4_k", "q6_k"), ("q4m", "q8", "q2_k")), (("q5_1",) * 2, ("iq4_xs", "nvfp4"))
    forms = [{"gated": len(each) == 3, "formats": each} for each in (*three, *two)]
    biases = [{f"{name}_bias": name[0] in given for name in ("gate", "up", "down")} for given in ("", "ud", "gud")]
    sizes = {"neurons": (80,), "dim": (48,), "rows": ROWS, "counts": BOTH, **ACTIVATION_BYTES}
    activations = {"activation": ("silu", "fatrelu(0.25)"), "up_activation": ("identity", "relu")}

    def is_block(each: Parameters) -> bool:
        return bool(each["gated"] or (each["up_activation"] == "identity" and not each["gate_bias"]))

    return pairs(is_block, forms=forms, biases=biases, **activations, **sizes)


def blocks_of_experts() -> list[Parameters]:
    """Blocks whose matrices are multiplied whole, of few experts and of one, with and without biases of experts."""
    experts = cycle(pairs(experts=(5, 1), chosen=(1, 2), expert_bias=BOTH))
    return [{**block, **chosen} for block, chosen in zip(whole_blocks(), experts, strict=False)]


def norms_behind(dim: int, rows: int) -> list[Any]:
    """No norm, and each kind of one, with and without a bias."""
    with_bias = [LayerNormSpec(dim, rows, 1e-5, weight=True, bias=bias) for bias in BOTH]
    return [None, RmsNormSpec(dim, rows, 1e-5), *with_bias]


VARIANTS: dict[type[KernelSpec], list[Parameters]] = {
    specs.AddSpec: pairs(dim=(96, 99), rows=ROWS),
    specs.AttentionSpec: attentions(),
    specs.CacheWriteSpec: pairs(**CACHES, head_dim=(20, 72), kv_dtype=KV_DTYPES, place=MODES),
    specs.CopyWordsSpec: pairs(words=(8, 300)),
    specs.CountedFfnSpec: ffns(),
    specs.CountedSendMaskSpec: pairs(dim=(96,), neurons=(200,), columns=(60,), rows=ROWS, in_words=BOTH),
    specs.UploadSpec: pairs(size=(64, 5000)),
    specs.DivideByRmsSpec: pairs(dim=(96, 99), rows=ROWS, neurons=(77,), eps=(1e-5, 1e-6), bias=BOTH),
    specs.ElementwiseSpec: [
        *pairs(dim=(96, 99), rows=ROWS, inputs=("rtv",), expression=("t0 = mul(x0, x1); add(t0, x2)",)),
        *pairs(dim=(96,), rows=(1,), inputs=("rv", "rr"), expression=("mul(x0, x1)", "mul(x1, x0)", "mul(x0, 2.0)")),
    ],
    specs.EmbeddingSpec: [
        *pairs(format=ROW_FORMATS, vocab=(50,), dim=(96, 100), rows=ROWS, offset=(0, 2)),
        *pairs(format=PANEL_FORMATS, vocab=(64,), dim=(96, 100), rows=ROWS, offset=(0, 2), panels=(True,)),
    ],
    specs.ExpertsSpec: blocks_of_experts(),
    specs.FfnSpec: [*ffns(), *experts_in_bundles()],
    specs.LayerNormSpec: pairs(dim=(96, 99), rows=ROWS, eps=(1e-5,), weight=BOTH, bias=BOTH, groups=(1, 3)),
    specs.TopLogitsSpec: pairs(vocab=(37, 300, 3000), rows=ROWS),
    specs.LinearAddSpec: pairs(
        linear=[LinearSpec(form, 64, 72, 1, bias) for form, bias in product(ROW_FORMATS, BOTH)],
        norm=norms_behind(64, 1),
    ),
    specs.SumNormSpec: [
        {"dim": 96, "rows": rows, "terms": terms, "norm": norm, "received": received, "counted": counted}
        for rows, terms, (received, counted) in product(ROWS, (2, 4), ((False, False), (True, False), (True, True)))
        for norm in norms_behind(96, rows)
    ],
    specs.LinearSpec: [
        *pairs(format=ROW_FORMATS, n=(64, 251), k=(72, 100), rows=ROWS, bias=BOTH),
        *pairs(format=PANEL_FORMATS, n=(64,), k=(72, 100), rows=ROWS, bias=BOTH, panels=(True,), **ACTIVATION_BYTES),
    ],
    specs.PredictLowRankSpec: pairs(formats=PREDICTED, neurons=(77,), rank=(5, 40), dim=(72,), relu=BOTH, rows=(1, 7)),
    specs.PredictSignsSpec: pairs(
        neurons=(50,), dims=[{"dim": dim, "row_bytes": sign_row_bytes(dim)} for dim in (13, 256, 257)], rows=(1, 7)
    ),
    specs.LendCacheSpec: pairs(**CACHES, width=(1, 20), dtype=("float16", "float32", "int8")),
    specs.BorrowCacheSpec: pairs(
        kv_heads=(1, 3), width=(1, 3, 20), dtype=("float16", "float32", "int8"), context=(50, 51)
    ),
    specs.JoinColumnsSpec: pairs(widths=((64, 7), (64, 64, 32)), rows=ROWS),
    specs.ReceiveSpec: pairs(dim=(96, 99), rows=ROWS, counted=BOTH),
    specs.ReceiveMaskSpec: pairs(neurons=(77, 200), rows=ROWS),
    specs.RmsNormSpec: pairs(dim=(96, 99), rows=ROWS, eps=(1e-5, 1e-6), groups=(1, 3)),
    specs.RotarySpec: pairs(heads=(3,), head_dim=(20, 32), context=(50,), place=MODES),
    specs.RouteSpec: pairs(
        rows=ROWS,
        scores=("softmax", "sigmoid"),
        normalized=("none", "sum"),
        scale=(1.0, 2.5),
        eps=(0.0, 1e-20),
        groups=[
            {"experts": 12, "chosen": 2},
            {"experts": 12, "chosen": 3, "groups": 4, "chosen_groups": 2},
            {"experts": 12, "chosen": 3, "groups": 4, "chosen_groups": 2, "group_score": "top2"},
        ],
        bias=BOTH,
        expert_scale=BOTH,
    ),
    specs.SendSpec: pairs(dim=(96, 99), rows=ROWS),
    specs.SendMaskSpec: pairs(dim=(96,), neurons=(200,), columns=(55, 60), rows=ROWS),
    specs.TakeLastSpec: pairs(dim=(96, 99), rows=ROWS),
    specs.WholeFfnSpec: whole_blocks(),
    **{spec: [{}] for spec in (specs.PingPongSpec, specs.SignalSpec, specs.WaitSpec)},
}


def declared(arguments: tuple[KernelArgument, ...]) -> tuple[KernelArgument, ...]:
    """Return the arguments that the caller passes: all but scratch memory and tickets."""
    return tuple(argument for argument in arguments if argument.access not in ("scratch", "tickets"))


def test_every_spec_has_its_bodies() -> None:
    modules = [import_module(module.name) for module in iter_modules(specs.__path__, f"{specs.__name__}.")]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    found = {each for each in found if issubclass(each, KernelSpec) and not isabstract(each)}
    assert set(CPU_BODIES) == found - GPU_ONLY
    assert set(CUDA_BODIES) == found - HOST_ONLY
    assert set(VARIANTS) == found


def test_two_bodies_of_one_spec_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "two_bodies").mkdir()
    for name in ("__init__", "one", "other"):
        text = "from picompile_codegen.backend import body\nfrom picompile_codegen.specs import SignalSpec\n"
        written = "" if name == "__init__" else f"\n\n@body(SignalSpec)\ndef {name}(spec, function): ...\n"
        (folder / f"{name}.py").write_text(text + written)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RegistryError, match=r"^two bodies of SignalSpec: two_bodies\.one\.one and two_bodies"):
        find_bodies("two_bodies")


@pytest.mark.parametrize("kind", VARIANTS, ids=lambda kind: kind.__name__)
def test_different_kernels_have_different_names(kind: type[KernelSpec]) -> None:
    names = {kind(**parameters).name for parameters in VARIANTS[kind]}
    assert len(names) == len(VARIANTS[kind]), "different kernels have the same name"


@pytest.mark.slow("writes every variant; a dozen of each spec are fast", but=("False-",))
@pytest.mark.parametrize("kind", VARIANTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("every", [False, True])
def test_bodies_take_the_arguments_of_their_spec(kind: type[KernelSpec], every: bool) -> None:
    for parameters in VARIANTS[kind][:: 1 if every else -(-len(VARIANTS[kind]) // 12)]:
        spec = kind(**parameters)
        bodies = [module for module, found in ((cpu, CPU_BODIES), (cuda, CUDA_BODIES)) if kind in found]
        if isinstance(spec, specs.CountedFfnSpec) and not spec.is_masked:
            bodies.remove(cpu)
        if parameters.get("experts") and cuda in bodies:
            bodies.remove(cuda)
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
