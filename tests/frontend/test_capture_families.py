"""Every family: both graphs give the logits of transformers, and the canonical one is as small as it can be."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from helpers.canonical import Model, canonicalize
from helpers.families import VARIANTS, VOCABULARY
from helpers.reference import eager_logits, relative_error
from picompile.frontend import hf
from picompile.frontend.build import build_model, call_model
from picompile.frontend.export import export_decoder
from picompile.frontend.families import find_family
from picompile.frontend.hf import capture_config
from picompile_passes.graph.layers import token_calls
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION, EMBEDDING, FFN

Models = Callable[[str], Model]

# What two layers have besides projections, attentions, blocks and sums.
_LLAMA = {"rms_norm": 5, "rotary": 4}
_OPT = {"layer_norm": 5, "embedding": 2, "add": 5}
_FALCON = {"layer_norm": 3, "rotary": 4, "index_select": 6}
_EXPECTED = {
    "opt-pre-norm": _OPT,
    # Neither the final norm; both projections of the embedding.
    "opt-post-norm": {**_OPT, "layer_norm": 4, "linear": 11},
    "opt-galactica": _OPT,
    "falcon-7b": _FALCON,
    # Two norms in each layer. Rows of q, k and v are selected out of one matrix, and out of its bias where it has one.
    "falcon-40b": {**_FALCON, "layer_norm": 5},
    # Norms across neurons and in front of the output projection; the first ones' weights scale the rows of down.
    "bitnet": {**_LLAMA, "rms_norm": 7, "mul": 2, "unsqueeze": 2},
    "falcon-serial": {**_FALCON, "layer_norm": 5, "index_select": 12},
    # Weights of norms with one added, of constants; rotary turns a half of each head.
    "nemotron": {"layer_norm": 5, "rotary": 4, "add": 9, "index_select": 4},
    "jais2": {"layer_norm": 5, "rotary": 4},
    # One matrix for q, k and v, of which each head has its own rows; a norm of each head; a part of it turns.
    "persimmon": {"layer_norm": 9, "rotary": 4, "expand": 8, "reshape": 16, "index_select": 28},
    # Norms of the embedding and, behind rotary, of each head; a soft cap of the logits.
    "nanochat": {**_LLAMA, "rms_norm": 10, "elementwise": 1, "expand": 4, "reshape": 8},
}
# The activation of the gate and of up; heads, heads of keys and values, and window.
_BLOCKS = {
    "llama-relu": ("relu", "identity"),
    "llama3-silu-tied": ("silu", "identity"),
    "prosparse": ("fatrelu(0.05)", "identity"),
    "bamboo": ("relu", "relu"),
    "turbosparse": ("relu", "relu"),
    "opt-galactica": ("gelu", "identity"),
}
_HEADS = {"mistral-window": (4, 1, 50), "falcon-7b": (3, 1, 0), "falcon-40b": (10, 5, 0), "llama-relu": (4, 2, 0)}


def _peak_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


@pytest.mark.slow("exports a model per family; two are fast", but=("llama-relu", "opt-post-norm"))
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_family(name: str, model: Models) -> None:
    variant = model(name)
    for tokens in (1, 2, 17):
        ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens))
        expected = eager_logits(variant.eager, ids.tolist())
        for logits in variant.logits(ids):
            assert relative_error(logits, expected) < 2e-5
    graph, facts = variant.canonical.graph, variant.captured.facts
    found = Counter(node.target._opname for node in graph.nodes if node.op == "call_function")
    common = {"embedding": 1, "linear": 9, "attention": 2, "ffn": 2, "add": 4, "transpose": 2}
    assert dict(found) == {**common, **_EXPECTED.get(name, _LLAMA)}
    held = [*variant.canonical.named_parameters(), *variant.canonical.named_buffers()]
    assert {name for name, tensor in held if tensor.is_meta} <= set(variant.captured.weights.names())
    # What is not a weight is small: frequencies and row tables.
    assert sum(tensor.numel() for _, tensor in held if not tensor.is_meta) < 3000
    # Marks are derived from the graph alone; torch.export knows the modules.
    for node in token_calls(graph):
        modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        traced = re.findall(r"\.(?:layers|h)\.(\d+)", modules[-1]) if modules else []
        assert node.meta["part"] == "head" or node.meta.get("layer") == (int(traced[0]) if traced else None)
    if name in _BLOCKS:
        blocks = [arguments(block) for block in calls(graph, FFN)]
        assert [(block["activation"], block["up_activation"]) for block in blocks] == [_BLOCKS[name]] * 2
        assert facts.activation == _BLOCKS[name][0]
    if name in _HEADS:
        attention = arguments(next(calls(graph, ATTENTION)))
        assert tuple(attention[key] for key in ("heads", "kv_heads", "window")) == _HEADS[name]
        assert (facts.heads, facts.kv_heads) == _HEADS[name][:2]


def test_a_llama_layer_is_nothing_else(model: Models) -> None:
    names = [n.target._opname for n in model("llama-relu").canonical.graph.nodes if n.op == "call_function"]
    layer = ["rms_norm", *["linear"] * 3, *["rotary"] * 2, "attention", "linear", "add", "rms_norm", "ffn", "add"]
    assert [name for name in names if name != "transpose"] == ["embedding", *layer, *layer, "rms_norm", "linear"]


def test_tied_embeddings_are_one_weight(model: Models) -> None:
    graph = model("qwen2").canonical.graph
    embedding = next(calls(graph, EMBEDDING))
    head = graph.output_node().args[0]
    assert head.args[1].target == embedding.args[1].target == "model.embed_tokens.weight"
    assert "lm_head.weight" not in set(model("qwen2").captured.weights.names())


def test_layers_share_frequencies_and_tables(model: Models) -> None:
    buffers = [name for name, tensor in model("falcon-40b").canonical.named_buffers() if not tensor.is_meta]
    assert len(buffers) == 4, f"frequencies, and the rows of q, k and v: {buffers}"


def test_facts(model: Models) -> None:
    facts = model("opt-post-norm").captured.facts
    assert (facts.architecture, facts.family) == ("OPTForCausalLM", "opt")
    assert (facts.hidden, facts.layers, facts.heads, facts.head_dim, facts.ffn) == (96, 2, 3, 32, 200)
    assert (facts.vocab, facts.max_positions, facts.checkpoint_dtype) == (503, 384, "f16")
    assert facts.parameters == sum(parameter.numel() for parameter in model("opt-post-norm").eager.parameters())
    assert (facts.bos_token_id, facts.eos_token_ids) == (2, (2,))


_SIZES = {"num_hidden_layers": 1, "vocab_size": 20, "hidden_size": 12, "num_attention_heads": 3}
_SIZES |= {"max_position_embeddings": 64, "intermediate_size": 20}


@pytest.mark.slow("exports a model per family; one family is fast", but=("LlamaForCausalLM",))
@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 12, "activation_function": "fatrelu"},
        {"architectures": ["FalconForCausalLM"], "activation": "fatrelu", "alibi": False},
        {"architectures": ["LlamaForCausalLM"], "hidden_act": "fatrelu"},
    ],
    ids=lambda fields: fields["architectures"][0],
)
def test_fatrelu_of_every_family(fields: dict[str, object]) -> None:
    """Families call their activation by different names; where it was not found, plain ReLU stayed."""
    graph = canonicalize(capture_config({**_SIZES, "ffn_dim": 20, "hidden_act_param": 0.05, **fields})).graph
    assert [arguments(block)["activation"] for block in calls(graph, FFN)] == ["fatrelu(0.05)"]


@pytest.mark.slow("exports a model four times")
def test_random_graphs_do_not_depend_on_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process exports a model once: for each that asks there is a copy."""
    config = {"architectures": ["LlamaForCausalLM"], **_SIZES}
    silu = capture_config({**config, "hidden_act": "silu"})
    text, held = str(silu.graph), {name: buffer for name, buffer in silu.named_buffers() if not buffer.is_meta}
    frequencies = {name: buffer.clone() for name, buffer in held.items()}
    assert frequencies
    for buffer in held.values():
        buffer.zero_()
    silu.graph.erase_node(silu.graph.output_node())
    # Nothing but the activation is another.
    assert "silu" not in str(capture_config({**config, "hidden_act": "relu"}).graph)
    assert capture_config({**config, "hidden_act": "silu", "rope_theta": 77.0}) is not silu
    monkeypatch.setattr(hf, "capture_model", None)
    again = capture_config({**config, "hidden_act": "silu"})
    assert str(again.graph) == text
    assert all(torch.equal(again.get_buffer(name), buffer) for name, buffer in frequencies.items())
    with pytest.raises(TypeError):
        capture_config({**config, "hidden_act": "silu", "rope_theta": 78.0})


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_capture_of_a_7b_shape_takes_no_memory_for_weights(model: Models) -> None:
    """Two of llama-7b's 32 layers: more only take longer."""
    model("llama-relu")  # What torch.export loads at its first use is not counted.
    # From here on the peak is counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    family = find_family({"architectures": ["LlamaForCausalLM"]})
    eager = build_model(family, LlamaConfig(num_hidden_layers=2), "silu")
    canonical = canonicalize(export_decoder(eager, call_model, 4096))
    grown = _peak_bytes() - before
    assert len(list(calls(canonical.graph, ATTENTION))) == 2
    assert sum(parameter.numel() * 4 for parameter in eager.parameters()) > 2_600_000_000
    assert grown < 300_000_000, f"capture took {grown >> 20} MiB"
