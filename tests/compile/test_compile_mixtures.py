"""Mixtures of experts, compiled for a CPU; and what they cannot be compiled with, in one line."""

import json
from pathlib import Path

import pytest
import torch

import picompile_runtime
from helpers.mixtures import MIXTURE, MIXTURES, captured_mixture
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.materialize import materialize

TOKENS = (7, 3, 250, 31, 99, 12, 5, 200, 18, 44, 2)


def _off(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of the logits of a token in the middle: a few may choose other experts by a rounding."""
    return float(((measured - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.slow("compiles eight models")
@pytest.mark.parametrize("name", list(MIXTURES))
@pytest.mark.parametrize(("quant", "bound"), [("f16", 4e-3), ("q8", 0.15)])
def test_a_compiled_mixture_computes_what_it_is(name: str, quant: str, bound: float, tmp_path: Path) -> None:
    """In chunks and token by token; exact is the default of neurons that can be silent."""
    shape = MIXTURES[name]
    captured = captured_mixture(shape, seed=4)
    options = CompileOptions(quant=quant, context=32, chunk=8, kv_dtype="f32")
    compile_model(captured, tmp_path / "artifact", options)
    with torch.no_grad():
        ids = torch.tensor(TOKENS)
        expected = materialize(captured.graph_module, captured.weights)(ids, torch.arange(len(ids)))
    with picompile_runtime.load(tmp_path / "artifact") as engine:
        chunks = torch.cat([torch.from_numpy(logits.copy()) for logits in engine.score(list(TOKENS))])
        engine.reset()
        decoded = torch.stack([torch.from_numpy(engine.decode(token).copy()).flatten() for token in TOKENS])
    assert _off(chunks, expected) < bound
    assert _off(decoded, expected) < bound
    kinds = {part["predictor"] for part in json.loads((tmp_path / "artifact" / "report.json").read_text())["ffn"]}
    assert kinds == {"none" if shape.activation == "silu" else "exact"}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": "4090"}, UnsupportedModelError, "is a mixture of experts, .* choose --target cpu"),
        ({"accelerator": "cpu"}, UnsupportedModelError, "is a mixture of experts, .* leave out --accelerator"),
        ({"predictor": "learned"}, UnsupportedModelError, "every neuron of a chosen expert fires"),
        ({"predictor": "sign"}, UnsupportedModelError, "predictors have nothing to predict"),
        ({"predictor": "exact"}, UnsupportedGraphError, "needs an activation that can be silent"),
    ],
)
def test_what_experts_cannot_have_is_said_at_once(
    options: dict[str, str], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        compile_model(captured_mixture(MIXTURE), tmp_path / "artifact", CompileOptions(context=32, **options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_before_it_is_captured(tmp_path: Path) -> None:
    config = {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="model is a mixture of experts"):
        compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(target="4090"))
