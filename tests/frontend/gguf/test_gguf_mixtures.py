"""Mixtures of experts in GGUF files: each against the model that was written, in its class of transformers."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers.gguf_mixtures import MIXTURES, build_mixture, save_mixture, save_mixture_of_blocks, write_mixture
from helpers.gguf_models import check_logits, loaded
from helpers.reference import eager_logits, relative_error
from helpers.support import ROOT
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.experts import Stack
from picompile.frontend.gguf.mixtures import MIXTURES as RECORDS
from picompile.frontend.gguf.model import GgufModel, open_gguf
from picompile.frontend.hf import load_model
from picompile.frontend.stored.choice import choose_stored
from picompile_passes.dialect import dequantize_rows
from picompile_passes.graph.materialize import evaluate_constant
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import QUANTIZE
from picompile_passes.passes.canonicalize import canonical_form
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize

# Each of these has something that no other has: the others are slow tests.
QUICK = (
    *("deepseek2 with softmax", "glm4moe", "gpt-oss", "granitemoe with a shared expert", "llama", "qwen2moe"),
    *("smallthinker", "smallthinker without windows"),
)
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def check(file: Path, name: str, fused: bool = False) -> None:
    mixture = MIXTURES[name]
    model = build_mixture(mixture)
    write_mixture(file, mixture, model, fused=fused)
    opened, state = open_gguf(file), model.state_dict()
    assert opened.config["architectures"] == [mixture.model_class]
    assert opened.tensors.keys() == state.keys()
    for parameter in opened.tensors:
        assert torch.equal(opened.load(parameter), state[parameter]), parameter
    check_logits(model, opened)


@pytest.mark.parametrize("name", QUICK)
def test_a_mixture(tmp_path: Path, name: str) -> None:
    check(tmp_path / "model.gguf", name)


@pytest.mark.slow("every other mixture; the fast ones have what distinguishes them")
@pytest.mark.parametrize("name", [name for name in MIXTURES if name not in QUICK])
def test_another_mixture(tmp_path: Path, name: str) -> None:
    check(tmp_path / "model.gguf", name)


def test_one_tensor_of_gate_and_up(tmp_path: Path) -> None:
    check(tmp_path / "model.gguf", "qwen3moe", fused=True)


def test_each_record_has_an_example() -> None:
    tried = {mixture.architecture for mixture in MIXTURES.values()}
    assert RECORDS.keys() == tried | {"qwen3vlmoe"}, "the text model of Qwen3-VL is Qwen3's"


def test_the_documentation_has_all() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    table = text.partition("\n| architectures of mixtures | model |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()]
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == set(RECORDS)


def rows_of(opened: GgufModel, name: str) -> torch.Tensor:
    """The rows of all experts, as a file has them."""
    values = opened.load(name)
    return (values.transpose(1, 2) if opened.is_turned(name) else values).flatten(0, 1)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe", "granitemoe with a shared expert", "llama"])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
def test_experts_are_packed_without_rounding(tmp_path: Path, name: str, type_name: str) -> None:
    """All rows, those of gate, those of up and some, packed and dequantized, have the numbers of the file."""
    opened = open_gguf(save_mixture(tmp_path, name, type_name=type_name))
    form, generator = {"Q8_0": "q8", "Q4_1": "q4_1"}[type_name], np.random.default_rng(5)
    stacks = [parameter for parameter in opened.tensors if ".experts." in parameter and "bias" not in parameter]
    shared = [parameter for parameter in opened.tensors if parameter.endswith("shared_mlp.input_linear.weight")]
    for parameter in (*stacks, *shared):
        turned = opened.is_turned(parameter)
        assert turned == (name == "gpt-oss")
        rows = rows_of(opened, parameter) if parameter in stacks else opened.load(parameter)
        assert opened.stored_format(parameter, turned) == form
        assert opened.stored_format(parameter, not turned) is None
        assert opened.packed(parameter, form, not turned) is None
        assert opened.packed(parameter, "q4", turned) is None
        count = len(rows)
        some = torch.from_numpy(generator.permutation(count)[: count // 3])
        for wanted in (None, torch.arange(count), torch.arange(0, count, 2), torch.arange(count)[: count // 2], some):
            packed = opened.packed(parameter, form, turned, wanted)
            assert packed is not None
            expected = rows if wanted is None else rows[wanted]
            assert torch.equal(dequantize_rows(packed, form, rows.shape[1]), expected), parameter


def test_gate_and_up_of_different_types_have_no_format(tmp_path: Path) -> None:
    mixture, file = MIXTURES["qwen3moe"], tmp_path / "model.gguf"
    write_mixture(file, mixture, build_mixture(mixture), types={"blk.1.ffn_up_exps.weight": "Q4_1"}, type_name="Q8_0")
    opened = open_gguf(file)
    assert opened.stored_format(GATE_UP) is None and opened.packed(GATE_UP, "q8") is None
    assert opened.stored_format(DOWN) == "q8" and opened.load(GATE_UP).dtype == torch.float32


def test_gate_and_up_of_different_shapes(tmp_path: Path) -> None:
    odd = {"blk.1.ffn_up_exps.weight": np.zeros((8, 32, 60))}
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_gate_exps\.weight makes"):
        open_gguf(save_mixture(tmp_path, "qwen3moe", tensors=odd))


@pytest.mark.parametrize(("interleaved", "transposed"), [(False, False), (True, True), (False, True), (True, False)])
def test_rows_of_stacks(interleaved: bool, transposed: bool) -> None:
    """Each row of a parameter comes from where `rows` says that it does."""
    stack = Stack(1, interleaved=interleaved, transposed=transposed)
    for tensors in ([torch.randn(3, 5, 7), torch.randn(3, 5, 7)], [torch.randn(3, 10, 7)]):
        made = stack.join(tensors)
        matrix = (made.transpose(1, 2) if transposed else made).flatten(0, 1)
        for wanted in (None, np.array([29, 3, 4, 0, 17])):
            found = torch.full((30 if wanted is None else 5, 7), torch.nan)
            for tensor, (places, rows) in zip(tensors, stack.rows(made.shape, wanted, len(tensors)), strict=True):
                found[torch.from_numpy(places)] = tensor.flatten(0, 1)[torch.from_numpy(rows)]
            assert torch.equal(found, matrix if wanted is None else matrix[wanted])


def test_latent_attention_of_older_files(tmp_path: Path) -> None:
    """Files of 2024 have one matrix for keys and values, and sizes of heads under other keys."""
    mixture, file = MIXTURES["deepseek2 with softmax"], tmp_path / "model.gguf"
    model = build_mixture(mixture)
    whole = {
        f"blk.{layer}.attn_kv_b.weight": model.state_dict()[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
        for layer in range(3)
    }
    keys = {"key_length": 16, "value_length": 16, "key_length_mla": None, "value_length_mla": None, "head_count_kv": 4}
    without = tuple(f"blk.{layer}.attn_{part}_b.weight" for layer in range(3) for part in "kv")
    more = {f"deepseek2.attention.{key}": value for key, value in keys.items()}
    write_mixture(file, mixture, model, tensors=whole, without=without, **more)
    check_logits(model, open_gguf(file))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    mixture, file = MIXTURES["glm4moe"], tmp_path / "model.gguf"
    model = build_mixture(mixture)
    further = {f"blk.3.{name}.weight": np.ones((64, 64)) for name in ("nextn.eh_proj", "attn_q")}
    more = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    write_mixture(file, mixture, model, tensors=further, **more)
    opened = open_gguf(file)
    assert opened.config["num_hidden_layers"] == 3
    assert len(opened.notes) == 1 and "blk.3.nextn.eh_proj.weight and 1 more" in opened.notes[0]
    check_logits(model, opened)


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("qwen3moe", {"qwen3moe.expert_weights_norm": False}, "expert_weights_norm is False, which is not read"),
        ("qwen3moe", {"qwen3moe.expert_weights_scale": 2.0}, "expert_weights_scale is 2.0, which is not read"),
        ("qwen3moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2, which is not read"),
        ("qwen3moe", {"qwen3moe.expert_shared_count": 1}, "expert_shared_count is 1, which is not read"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 9}, "expert_used_count is 9, of 8 experts"),
        ("qwen3moe", {"qwen3moe.expert_count": 6}, "makes model.layers.0.mlp.experts.gate_up_proj|mlp.gate.weight"),
        ("qwen3moe", {"qwen3moe.expert_count": None}, "no qwen3moe.expert_count in it"),
        ("olmoe", {"olmoe.attention.clamp_kqv": 8.0}, "clamp_kqv is 8.0, which is not read"),
        ("deepseek2", {"deepseek2.expert_group_count": 3}, "3 of 8 experts are chosen from 2 of 3 groups"),
        ("deepseek2", {"deepseek2.expert_gating_func": 1}, "by softmax, with a bias, are not supported"),
        ("deepseek2", {"deepseek2.expert_gating_func": 4}, "expert_gating_func is 4, which is not read"),
        ("hunyuan-moe", {"hunyuan-moe.expert_shared_count": 2}, "a shared expert of 96 neurons"),
        ("dots1", {"dots1.attention.sliding_window": 16}, "sliding_window without the layers"),
        ("smallthinker", {"smallthinker.attention.sliding_window": 16}, "sliding_window is 16, which is not read"),
        ("smallthinker", {"smallthinker.attention.sliding_window_pattern": 2}, "pattern is 2, which is not read"),
        ("smallthinker", {"smallthinker.expert_gating_func": 3}, "expert_gating_func is 3, which is not read"),
        ("smallthinker", {"smallthinker.expert_gating_func": None}, "no smallthinker.expert_gating_func in it"),
    ],
)
def test_values_that_a_class_does_not_have(tmp_path: Path, name: str, more: dict[str, object], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        open_gguf(save_mixture(tmp_path, name, **more))


def test_experts_of_another_architecture(tmp_path: Path) -> None:
    from helpers.gguf_architectures import save_architecture

    file = save_architecture(tmp_path, "arcee", **{"arcee.expert_count": 4, "arcee.expert_used_count": 2})
    with pytest.raises(UnsupportedModelError, match="of the architecture arcee are not supported"):
        open_gguf(file)


@pytest.mark.parametrize("tensor", ["ffn_up_exps.weight", "ffn_gate_exps.bias", "attn_sinks.weight"])
def test_a_tensor_that_is_missing(tmp_path: Path, tensor: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"makes model|has no tensor for"):
        open_gguf(save_mixture(tmp_path, "gpt-oss", without=(f"blk.1.{tensor}",)))


def kept_numbers(file: Path) -> dict[str, str]:
    """The formats of the quantized matrices of a model, each compared with what the file stands for."""
    captured = load_model(file)
    graph_module = InsertPredictors("none")(canonical_form(captured.graph_module)).graph_module
    choice = choose_stored(captured, graph_module)
    assert not choice.reasons
    quantized = Quantize(format="f16", tensors=choice.formats)(graph_module).graph_module
    kept = set()
    for node in calls(quantized.graph, QUANTIZE):
        operands = arguments(node)
        if operands["format"] == "f16":
            continue
        matrix = evaluate_constant(quantized, operands["weight"], captured.weights)
        packed = evaluate_constant(quantized, node, captured.weights)
        assert torch.equal(dequantize_rows(packed, operands["format"], matrix.shape[1]), matrix), node.name
        source = operands["weight"]
        while source.op != "get_attr":
            source = source.all_input_nodes[0]
        kept.add(source.target)
    assert kept == choice.formats.keys()
    return dict(choice.formats)


@pytest.mark.slow("captures a mixture per format", but=("gpt-oss",))
@pytest.mark.parametrize(("name", "type_name"), [("gpt-oss", "MXFP4"), ("qwen3moe", "Q4_1")])
def test_a_graph_keeps_the_numbers(tmp_path: Path, name: str, type_name: str) -> None:
    """Gate, up and down of all experts are packed as the file has them; other numbers are those of the file too."""
    formats = kept_numbers(save_mixture(tmp_path, name, type_name=type_name))
    assert {formats[parameter] for parameter in (GATE_UP, DOWN)} == {{"MXFP4": "mxfp4", "Q4_1": "q4_1"}[type_name]}
    assert len(formats) == 3 * 6 + 2


@pytest.mark.slow("captures every mixture")
@pytest.mark.parametrize("name", [name for name in MIXTURES if name not in ("gpt-oss", "qwen3moe")])
def test_another_graph_keeps_the_numbers(tmp_path: Path, name: str) -> None:
    """Latent matrices of DeepSeek are so small here that they are plain."""
    block = "block_sparse_moe" if name.startswith(("granite", "smallthinker")) else "mlp"
    assert GATE_UP.replace("mlp", block) in kept_numbers(save_mixture(tmp_path, name, type_name="Q8_0"))


# As llama.cpp's Q4_K_M has them, and gpt-oss as it is published.
_Q4_K_M = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps"), "Q4_K"),
    **dict.fromkeys(("token_embd", "attn_v", "ffn_down_exps", "output"), "Q6_K"),
}
_OSS = {
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4"),
    **dict.fromkeys(("token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output"), "Q8_0"),
}
_TYPES = {"llama": (_Q4_K_M, {"q4_k": 3 * 5, "q6_k": 3 * 2 + 2}), "gpt-oss": (_OSS, {"q8": 3 * 4 + 2, "mxfp4": 3 * 3})}


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("name", _TYPES)
def test_a_compiled_file_has_its_numbers(tmp_path: Path, name: str) -> None:
    """But for activations, of 16 bits, the compiled model is the file's."""
    types, kept = _TYPES[name]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
    save_mixture_of_blocks(tmp_path / "model.gguf", name, types, **sizes)
    compile_model(tmp_path / "model.gguf", tmp_path / "artifact", CompileOptions(context=64))
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    assert Counter(report["weight_formats"].values()) == {**kept, "f16": 3}, "routers are plain"
    model, ids = loaded(open_gguf(tmp_path / "model.gguf")), [3, 5, 7, 11, 13, 17, 19]
    with picompile_runtime.load(tmp_path / "artifact", threads=1) as engine:
        found = [torch.from_numpy(engine.prefill(ids).copy())]
        while len(found) < 8:
            ids.append(int(found[-1].argmax()))
            found.append(torch.from_numpy(engine.decode(ids[-1]).copy()))
    expected = eager_logits(model, ids)[6:]
    assert relative_error(torch.stack(found).view_as(expected), expected) < 2.5e-3
