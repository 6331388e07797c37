"""TurboSparse-Mixtral, whose code is in its checkpoint alone, against its definition in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

import picompile_runtime
from helpers.greedy import first_difference
from helpers.published_mixtures import TURBOSPARSE_MIXTRAL, PlainMixture, published_tensors, save_published
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.families import find_family
from picompile.frontend.hf import load_model, open_checkpoint
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, ROUTE
from picompile_passes.passes.canonicalize import canonicalize

_PREDICTOR = "model.layers.0.block_sparse_moe.experts.1.predictor"


def _saved(folder: Path, **changes: Any) -> Path:
    save_published(folder, {**TURBOSPARSE_MIXTRAL, **changes}, published_tensors(TURBOSPARSE_MIXTRAL))
    return folder


@pytest.mark.slow("compiles a model; test_smallthinker.py compiles a mixture that is fast")
@pytest.mark.parametrize("predictor", ["none", "exact"])
def test_greedy_tokens_equal_the_definition(predictor: str, tmp_path: Path) -> None:
    compile_model(_saved(tmp_path / "model"), tmp_path / "artifact", CompileOptions(predictor=predictor, quant="f16"))
    plain = PlainMixture(TURBOSPARSE_MIXTRAL, published_tensors(TURBOSPARSE_MIXTRAL))
    assert first_difference(plain, tmp_path / "artifact") is None
    with picompile_runtime.load(tmp_path / "artifact", threads=1) as engine:
        engine.prefill([5, 7, 11])
        for token in range(20, 40):
            engine.decode(token)
        shares = [block.computed_share for block in engine.firing()]
    # Of the neurons of chosen experts: about half of the gates are above zero.
    assert all(share == 1.0 if predictor == "none" else 0.4 < share < 0.6 for share in shares)


def test_the_graph_has_routes_and_blocks_of_two_sides(tmp_path: Path) -> None:
    captured = load_model(_saved(tmp_path))
    assert captured.facts.activation == "relu" and captured.facts.ffn == 6 * 48
    graph = canonicalize(captured.graph_module).graph
    routes, blocks = ([arguments(node) for node in calls(graph, target)] for target in (ROUTE, FFN))
    assert [(route["chosen"], route["normalized"]) for route in routes] == [(2, "softmax")] * 3
    assert [(block["activation"], block["up_activation"]) for block in blocks] == [("relu", "relu")] * 3


def test_predictors_in_the_checkpoint_are_left_out_in_one_line(tmp_path: Path) -> None:
    tensors = published_tensors(TURBOSPARSE_MIXTRAL)
    tensors |= {f"{_PREDICTOR}.{name}.weight": torch.ones(2, 2) for name in ("fc1", "fc2")}
    save_published(tmp_path, TURBOSPARSE_MIXTRAL, tensors)
    opened = open_checkpoint(tmp_path)
    code, (line,) = opened.warnings[0], opened.warnings[1:]
    assert "auto_map names code in the checkpoint, which is never run" in code
    assert "its authors' code skips neurons" in line and "fc1.weight and 1 more" in line
    save_published(tmp_path, TURBOSPARSE_MIXTRAL, tensors | {f"{_PREDICTOR}.fc3.weight": torch.ones(2)})
    with pytest.raises(UnsupportedModelError, match=r"holds .*predictor\.fc3\.weight"):
        open_checkpoint(tmp_path)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    """Their code has SiLU on both sides where the config says so."""
    _saved(tmp_path, hidden_act="silu")
    with pytest.raises(UnsupportedModelError, match=r"hidden_act is silu, but .* give --activation relu"):
        load_model(tmp_path)
    assert load_model(tmp_path, "relu").facts.activation == "relu"
    with pytest.raises(UnsupportedModelError, match="has its activation in its own code"):
        load_model(tmp_path, "fatrelu(0.1)")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = published_tensors(TURBOSPARSE_MIXTRAL)
    del tensors["model.layers.2.block_sparse_moe.experts.4.w3.weight"]
    save_published(tmp_path, TURBOSPARSE_MIXTRAL, tensors)
    with pytest.raises(UnsupportedModelError, match=r"no tensor \.experts\.4\.w3\.weight"):
        open_checkpoint(tmp_path)
    with pytest.raises(UnsupportedModelError, match="are different models"):
        find_family({**TURBOSPARSE_MIXTRAL, "model_type": "mixtral"})
