"""Checkpoints of mixtures with random weights: those that transformers reads, and that compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.fx import Interpreter, Node

from helpers.digests import digests
from helpers.support import Cli
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.facts import names_experts
from picompile.frontend.hf import load_model
from picompile.synth.mixtures import MIXTURES
from picompile.synth.random_model import write_random_model
from picompile.synth.shapes import SHAPES, find_config
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import SPARSE_FFN
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "layers_block_type": ["full_attention", "moe"],
    "num_experts_per_tok": 2,
    "moe_num_primary_experts": 6,
    "moe_num_active_primary_experts": 2,
    "moe_ffn_hidden_size": 32,
    "rope_layout": [0, 1],
    "sliding_window_layout": [0, 1],
    "vocab_size": 300,
    "bos_token_id": 290,
    "eos_token_id": 291,
    "pad_token_id": None,
}


def small(name: str) -> dict[str, Any]:
    """The config of a named mixture with few layers and experts."""
    config = MIXTURES[name]
    return {**config, **{key: value for key, value in _SMALL.items() if key in config}}


@pytest.mark.slow("captures a mixture per case", but=("gpt-oss", "relu2"))
@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "relu2-moe-1b-5b"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = small(name)
    written = write_random_model(name, config, 3, tmp_path / "model", "f32")
    captured = load_model(tmp_path / "model")
    eager = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert written.parameters == sum(tensor.numel() for tensor in eager.state_dict().values())
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = eager(ids.unsqueeze(0)).logits[0]
        logits = materialize(canonicalize(captured.graph_module), captured.weights)(ids, torch.arange(40))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    # Tokens differ, and no token is sure.
    assert 0.5 < float(logits.std()) < 10
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    config = small("olmoe-1b-7b")
    for folder, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_random_model("olmoe", config, seed, tmp_path / folder)
    assert digests(tmp_path / "one") == digests(tmp_path / "again")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    with pytest.raises(UsageError, match="exists"):
        write_random_model("olmoe", config, 1, tmp_path / "one")
    with pytest.raises(UnsupportedModelError, match="cannot hold 256 bytes"):
        write_random_model("olmoe", {**config, "vocab_size": 100}, 1, tmp_path / "small")


class _Firing(Interpreter):
    """Adds up which neurons fire of all that chosen experts have: `fired` of `computed`."""

    fired = computed = 0.0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if is_call(n, SPARSE_FFN):
            mask, gains = (self.env[arguments(n)[name]] for name in ("mask", "gains"))
            chosen = (gains != 0).repeat_interleave(mask.shape[1] // gains.shape[1], dim=1)
            self.fired += float((mask & chosen).sum())
            self.computed += float(chosen.sum())
        return value


@pytest.mark.slow("captures a mixture per case", but=("tiny-mixture-0.05",))
@pytest.mark.parametrize(
    ("name", "active"),
    [
        *(("tiny-mixture", active) for active in (0.05, 0.1, 0.4, 1.0)),
        *(("turbosparse-mixtral", 0.1), ("smallthinker-4b-a0.6b", 0.1)),
    ],
)
def test_neurons_of_experts_fire_at_the_rate_asked_for(name: str, active: float, tmp_path: Path) -> None:
    config = MIXTURES[name] if name == "tiny-mixture" else small(name)
    layouts = {name: [0, 1, 1, 1] for name in ("rope_layout", "sliding_window_layout") if name in config}
    config = {**config, **layouts, "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512}
    write_random_model("tiny", config, 5, tmp_path / "model", active=active)
    captured = load_model(tmp_path / "model")
    graph_module = InsertPredictors("exact")(canonicalize(captured.graph_module)).graph_module
    firing = _Firing(materialize(graph_module, captured.weights), garbage_collect_values=False)
    ids = torch.randint(0, 512, (200,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = firing.run(ids, torch.arange(200))
    assert firing.fired / firing.computed == pytest.approx(active, rel=0.1)
    # No token wins whatever was read.
    assert len(set(logits.argmax(-1).tolist())) > 50


def test_a_rate_of_neurons_that_always_fire_is_refused(cli: Cli, tmp_path: Path) -> None:
    refused = cli("synth", "--shape", "olmoe-1b-7b", "--active", 0.1, "-o", tmp_path / "model")
    assert refused.code == 2
    assert "olmoe-1b-7b: its experts have no ReLU, so all their neurons fire" in refused.err
    assert not (tmp_path / "model").exists()


def test_mixtures_are_found_by_name_and_known_by_their_fields() -> None:
    for name in MIXTURES:
        assert find_config(name) == (name, MIXTURES[name])
        assert names_experts(MIXTURES[name])
    assert not any(names_experts(shape.config) for shape in SHAPES.values())


@pytest.mark.slow("makes and compiles a model")
def test_the_command_makes_one_that_compiles(cli: Cli, tmp_path: Path) -> None:
    made = cli("synth", "--shape", "tiny-mixture", "-o", tmp_path / "model")
    assert made.code == 0
    assert "random weights" in made.out
    compiled = cli("compile", tmp_path / "model", "-o", tmp_path / "artifact", "--context", 32)
    assert compiled.code == 0, compiled.err
    assert cli("run", tmp_path / "artifact", "-p", "hello", "-n", 3).code == 0
