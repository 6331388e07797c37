"""Rotary scaling, as old and as new checkpoints write it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from helpers.canonical import Model, canonicalize
from helpers.reference import eager_logits, relative_error
from picompile import CompileOptions, UsageError, compile_model
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model, open_checkpoint
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ROTARY

_LONG = {"factor": 2.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, float32, no scaling."""
    folder = tmp_path_factory.mktemp("rope")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 3, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, vocab_size=60, max_position_embeddings=128, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _loaded(checkpoint: Path, length: int) -> tuple[Any, Captured, GraphModule]:
    """The eager model, and both graphs, which were compared with it."""
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    captured = load_model(checkpoint)
    canonical = canonicalize(captured.graph_module)
    ids = torch.arange(length) * 7 % 60
    for logits in Model(eager, captured, canonical).logits(ids):
        assert relative_error(logits, eager_logits(eager, ids.tolist())) < 2e-5
    return eager, captured, canonical


def _configure(folder: Path, fields: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "rope_theta", "rope_scaling"):
        config.pop(name, None)
    path.write_text(json.dumps(config | fields))


@pytest.mark.slow("exports a model per scaling; one is fast", but=("fields0-",))
@pytest.mark.parametrize(
    ("fields", "theta", "kind"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}}, 5e5, "llama3"),
        # The oldest form says `type`.
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, 2e4, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **_YARN}}, 1e4, "yarn"),
        ({}, 1e4, "default"),
    ],
)
def test_scaling_equals_eager_transformers(fields: dict, theta: float, kind: str, checkpoint: Path) -> None:
    _configure(checkpoint, fields)
    eager, _, canonical = _loaded(checkpoint, 100)
    module = eager.model.rotary_emb
    assert (module.rope_type, module.config.rope_parameters["rope_theta"]) == (kind, theta)
    node = next(calls(canonical.graph, ROTARY))
    frequencies = canonical.get_buffer(arguments(node)["inverse_frequency"].target)
    assert torch.equal(frequencies, module.inv_freq), "the frequencies come out exactly, not about"
    assert open_checkpoint(checkpoint).facts.max_positions == 128
    assert arguments(node)["scaling"] == pytest.approx(module.attention_scaling, rel=1e-6)


@pytest.mark.slow("exports a model; the other scaling is fast", but=("scaling0-",))
@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8, **_LONG}, 64),
    ],
)
@pytest.mark.usefixtures("proofs")
def test_scaling_that_depends_on_the_length(scaling: dict, longest: int, checkpoint: Path) -> None:
    """The model is compiled as it is for short texts, and takes no others."""
    _configure(checkpoint, {"rope_theta": 1e4, "rope_scaling": scaling})
    _, captured, _ = _loaded(checkpoint, longest)
    assert captured.facts.max_positions == longest
    assert (not captured.warnings) == (longest == 128)
    captured.prove()
    with pytest.raises(UsageError, match=rf"{longest}"):
        compile_model(checkpoint, checkpoint / "artifact", CompileOptions(context=longest + 1))


@pytest.mark.parametrize(("factor", "original", "longest"), [(4.0, 128, 512), (4.0, 16, 128), (2.5, 100, 250)])
def test_yarn_extends_the_context(factor: float, original: int, longest: int, checkpoint: Path) -> None:
    """Qwen2.5's recipe adds the scaling and leaves `max_position_embeddings`, here 128."""
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    _configure(checkpoint, {"rope_theta": 1e4, "rope_scaling": scaling})
    assert open_checkpoint(checkpoint).facts.max_positions == longest
