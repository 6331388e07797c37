"""SmallThinker, whose code is in its checkpoint alone, against its definition in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

import picompile_runtime
from helpers.greedy import first_difference
from helpers.published_mixtures import SMALLTHINKER, PlainMixture, published_tensors, save_published
from helpers.reference import relative_error
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.hf import load_model, open_checkpoint
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION, FFN, ROUTE
from picompile_passes.passes.canonicalize import canonicalize

# The large model's kinds of layers with either router, and the small one's.
_VARIANTS: dict[str, dict[str, Any]] = {
    "twelve layers": {
        "num_hidden_layers": 12,
        "rope_layout": [0, 1, 1, 1] * 3,
        "sliding_window_layout": [0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1],
    },
    "as the large one": {"tie_word_embeddings": False},
    "softmax": {"moe_primary_router_apply_softmax": True},
    "as the small one": {"rope_layout": [1] * 4, "sliding_window_layout": [0] * 4},
}


def _saved(folder: Path, **changes: Any) -> Path:
    config = {**SMALLTHINKER, **changes}
    save_published(folder, config, published_tensors(config))
    return folder


@pytest.mark.slow("captures a model per variant", but=("as the small one", "softmax"))
@pytest.mark.parametrize("variant", _VARIANTS)
def test_logits_equal_the_definition(variant: str, tmp_path: Path) -> None:
    config = SMALLTHINKER | _VARIANTS[variant]
    captured = load_model(_saved(tmp_path, **_VARIANTS[variant]))
    ids = torch.randint(200, (40,), generator=torch.Generator().manual_seed(1))
    expected = PlainMixture(config, published_tensors(config))(ids.unsqueeze(0)).logits[0]
    with torch.no_grad():
        found = materialize(canonicalize(captured.graph_module), captured.weights)(ids, torch.arange(40))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow("compiles a model; one predictor is fast", but=("exact",))
@pytest.mark.parametrize("predictor", ["none", "exact"])
def test_greedy_tokens_equal_the_definition(predictor: str, tmp_path: Path) -> None:
    """The router's choice is made before attention and used behind it, in prompts and token by token."""
    compile_model(_saved(tmp_path / "model"), tmp_path / "artifact", CompileOptions(predictor=predictor, quant="f16"))
    assert first_difference(PlainMixture(SMALLTHINKER, published_tensors(SMALLTHINKER)), tmp_path / "artifact") is None
    with picompile_runtime.load(tmp_path / "artifact", threads=1) as engine:
        engine.prefill([5, 7, 11])
        for token in range(20, 40):
            engine.decode(token)
        shares = [block.computed_share for block in engine.firing()]
    # Of the neurons of chosen experts: about half of the gates are above zero.
    assert all(share == 1.0 if predictor == "none" else 0.4 < share < 0.6 for share in shares)


@pytest.mark.slow("compiles a model")
def test_prompts_in_chunks_and_several_sequences_at_once(tmp_path: Path) -> None:
    """What a router says before attention is kept for each token of a chunk, and for each sequence of a batch."""
    options = CompileOptions(quant="f16", kv_dtype="f32", chunk=7, sequences=2, context=64)
    compile_model(_saved(tmp_path / "model"), tmp_path / "artifact", options)
    plain = PlainMixture(SMALLTHINKER, published_tensors(SMALLTHINKER))
    texts = [torch.randint(200, (24,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    expected = [plain(ids.unsqueeze(0)).logits[0] for ids in texts]
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        scored = torch.cat([torch.from_numpy(rows.copy()) for rows in engine.score(texts[0].tolist())])
        assert relative_error(scored, expected[0]) < 1e-3
        for slot, ids in enumerate(texts):
            engine.reset(slot)
            engine.prefill(ids[:16].tolist(), slot)
        for token in range(16, 24):
            rows = engine.decode_sequences([int(ids[token]) for ids in texts], [0, 1])
            for row, logits in zip(rows, expected, strict=True):
                assert relative_error(torch.from_numpy(row), logits[token]) < 1e-3


def test_the_router_reads_what_attention_reads_unnormed(tmp_path: Path) -> None:
    captured = load_model(_saved(tmp_path))
    assert captured.facts.activation == "relu" and captured.facts.ffn == 6 * 48 and captured.facts.head_dim == 24
    graph = canonicalize(captured.graph_module).graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    attentions, routes, blocks = (list(calls(graph, target)) for target in (ATTENTION, ROUTE, FFN))
    assert [arguments(node)["window"] for node in attentions] == [0, 9, 9, 9]
    # Experts are chosen by logits: where these are large, their sigmoids are all 1.
    rules = {(arguments(node)["scores"], arguments(node)["normalized"]) for node in routes}
    assert rules == {("identity", "sigmoid_sum")}
    for layer, (attention, route, block) in enumerate(zip(attentions, routes, blocks, strict=True)):
        logits = arguments(route)["logits"]
        assert order[logits] < order[attention] < order[block]
        assert logits.meta["layer"] == block.meta["layer"] == layer
        assert arguments(block)["gains"] is route and arguments(block)["up_activation"] == "identity"


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "secondary experts": ({"moe_enable_secondary_experts": True}, "moe_enable_secondary_experts is True, which is not"),
    "shared experts": ({"moe_shared_primary_experts": 1}, "moe_shared_primary_experts is 1, which is not supported"),
    "a late router": ({"moe_enable_early_router": False}, "moe_enable_early_router is False, which is not supported"),
    "norms of heads": ({"use_qk_norm": True}, "use_qk_norm is True, which is not supported"),
    "scores as they are": ({"norm_topk_prob": False}, "norm_topk_prob is False, which is not supported"),
    "a layer without experts": ({"moe_layer_layout": [1, 1, 0, 1]}, "moe_layer_layout has layers without experts"),
    "a short layout": ({"rope_layout": [1, 1]}, "rope_layout must have a 0 or 1 for each of the 4 layers"),
    "a layout of others": ({"sliding_window_layout": [0, 1, 2, 1]}, "sliding_window_layout must have a 0 or 1"),
    "no window": ({"sliding_window_size": None}, "layers with a window, but sliding_window_size says none"),
    "too many experts": ({"moe_num_active_primary_experts": 7}, "moe_num_active_primary_experts is 7, of 6 experts"),
    "no number of experts": ({"moe_num_active_primary_experts": "2"}, "moe_num_active_primary_experts must be a whole"),
    "a layout that is none": ({"rope_layout": 1}, "rope_layout must have a 0 or 1"),
    "no neurons": ({"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size must be a whole number"),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_what_is_not_implemented_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    changes, message = _REFUSED[what]
    _saved(tmp_path)
    save_published(tmp_path, {**SMALLTHINKER, **changes}, published_tensors(SMALLTHINKER))
    with pytest.raises(UnsupportedModelError, match=f"config.json: .*{message}") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_fields_of_the_published_config_need_no_word(tmp_path: Path) -> None:
    (line,) = open_checkpoint(_saved(tmp_path)).warnings
    assert line.endswith("auto_map names code in the checkpoint, which is never run") and "knows" not in line
    (line,) = open_checkpoint(_saved(tmp_path, moe_secondary_expert_size=4, other=1)).warnings
    assert "knows moe_secondary_expert_size, other" in line


def test_tensors_of_other_parts_are_refused(tmp_path: Path) -> None:
    tensors = published_tensors(SMALLTHINKER)
    more = {"model.layers.0.block_sparse_moe.secondary_router.weight": torch.ones(2, 64)}
    save_published(tmp_path, SMALLTHINKER, tensors | more)
    with pytest.raises(UnsupportedModelError, match=r"holds .*secondary_router.*no place for"):
        open_checkpoint(tmp_path)
    del tensors["model.layers.1.block_sparse_moe.experts.2.up.weight"]
    save_published(tmp_path, SMALLTHINKER, tensors)
    with pytest.raises(UnsupportedModelError, match=r"no tensor \.experts\.2\.up\.weight"):
        open_checkpoint(tmp_path)
