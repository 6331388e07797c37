"""The activation that a user gives, in place of the one that a config.json names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.gguf_files import EXAMPLES, build, write_example
from helpers.small_models import small_config, small_model
from picompile import UnsupportedModelError, UsageError
from picompile.config import CompileOptions
from picompile.frontend import hf
from picompile.frontend.activation import dialect_text, with_activation
from picompile.frontend.build import call_model
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.families import ACTIVATIONS
from picompile.frontend.hf import load_model, raw_activation
from picompile.frontend.model_file import read_config
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.train.options import TrainOptions
from picompile_passes.graph.materialize import materialize

Raw = dict[str, Any]
_LLAMA: Raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_SPARSE_LM: Raw = {"architectures": ["SparseLlamaForCausalLM"], "model_type": "llama_sparse_relu"}
_PROSPARSE: Raw = {"architectures": ["SparseLlamaForCausalLM"], "model_type": "sparsellama"}
_OPT: Raw = {"architectures": ["OPTForCausalLM"], "model_type": "opt"}
_BAMBOO: Raw = {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"}
_GPT2: Raw = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
_GEMMA2: Raw = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
_BLOOM: Raw = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}


@pytest.mark.parametrize(
    ("raw", "activation", "changed"),
    [
        (_LLAMA | {"hidden_act": "silu"}, "relu", {"hidden_act": "relu"}),
        (_LLAMA, "relu", {"hidden_act": "relu"}),
        (_LLAMA | {"hidden_act": "my_relu"}, "gelu_new", {"hidden_act": "gelu_new"}),
        (_LLAMA | {"hidden_act": "silu"}, "fatrelu(1e-2)", {"hidden_act": "fatrelu", "hidden_act_param": 0.01}),
        (_LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": 0.01}, "relu", {"hidden_act": "relu"}),
        (_LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": "x"}, "fatrelu(0.5)", {"hidden_act_param": 0.5}),
        (_SPARSE_LM | {"hidden_act": "silu"}, "relu", {"hidden_act": "relu"}),
        (_OPT, "silu", {"activation_function": "silu"}),
        (_GPT2, "relu", {"activation_function": "relu"}),
        (_GEMMA2 | {"hidden_activation": "gelu_pytorch_tanh"}, "relu2", {"hidden_activation": "relu2"}),
        # What the config says already, if by another name, by default or in the class's own code.
        (_LLAMA | {"hidden_act": "silu"}, "swish", {}),
        (_LLAMA, "silu", {}),
        (_LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": 0.01}, "fatrelu(0.010)", {}),
        (_GPT2, "gelu_fast", {}),
        (_BAMBOO | {"hidden_act": "silu"}, "relu", {}),
        (_BLOOM, "relu", {}),
        (_LLAMA | {"hidden_act": "silu"}, None, {}),
    ],
)
def test_what_a_config_becomes(raw: Raw, activation: str | None, changed: Raw) -> None:
    before = json.dumps(raw)
    assert with_activation(raw, activation) == raw | changed
    assert json.dumps(raw) == before


@pytest.mark.parametrize("name", [*ACTIVATIONS, "fatrelu(0.0)", "fatrelu(0.25)"])
def test_every_name_is_the_activation_of_the_config(name: str) -> None:
    raw = with_activation(_LLAMA | {"hidden_act": "relu6" if name != "relu6" else "relu"}, name)
    assert raw_activation(hf.find_family(raw), raw) == dialect_text(name)


@pytest.mark.parametrize(
    ("raw", "activation", "text"),
    [
        (_BAMBOO, "silu", "--activation silu: models of the family bamboo always compute relu"),
        (_BAMBOO, "fatrelu(0.1)", "models of the family bamboo always compute relu"),
        (_GPT2, "fatrelu(0.1)", "FATReLU is supported for the families falcon, llama, mistral, opt, qwen2, not for gp"),
        ({"model_type": "nobodys"}, "relu", "nobodys"),
        # What a family may name still applies.
        (_SPARSE_LM | {"hidden_act": "relu"}, "silu", r"give --activation relu, or say relu in config\.json"),
        (_PROSPARSE | {"hidden_act": "relu"}, "silu", r"give --activation relu, or say relu in config\.json"),
    ],
)
def test_what_a_class_cannot_compute(raw: Raw, activation: str, text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text) as caught:
        changed = with_activation(raw, activation)
        raw_activation(hf.find_family(changed), changed)
    assert "\n" not in str(caught.value)


_NO_NAMES = ("ReLU", "", "fatrelu", "fatrelu()", "fatrelu(x)", "fatrelu(-1)", "fatrelu(nan)", "fatrelu(1e99)", "a\nb")


@pytest.mark.parametrize("name", _NO_NAMES)
def test_unknown_names_are_refused_before_anything_is_read(name: str) -> None:
    says = r"^unknown activation .*; known are gelu, .* tanh, fatrelu\(THRESHOLD\)$"
    if name.startswith("fatrelu"):
        says = r"^'fatrelu.*': FATReLU has a threshold of 0 or more, as in fatrelu\(0\.01\)$"
    for use in (load_model, fingerprint):
        with pytest.raises(UsageError, match=says):
            use(Path("no such folder"), name)
    for options in (CompileOptions, ProfileOptions, TrainOptions):
        with pytest.raises(UsageError, match=says):
            options(activation=name)


def _with_config(folder: Path, copy: Path, **changes: object) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


@pytest.mark.slow("captures a model")
def test_sparse_lm(tiny_model: Path, tmp_path: Path) -> None:
    """As SakanaAI published it: its class computes ReLU, and its config says silu.

    With --activation relu it is the model whose config.json says relu.
    """
    sparse_lm = _with_config(tiny_model, tmp_path / "silu" / "model", **_SPARSE_LM, hidden_act="silu")
    edited = _with_config(sparse_lm, tmp_path / "model", hidden_act="relu")
    with pytest.raises(UnsupportedModelError, match=r"own code; where that is ReLU, give --activation relu, or say"):
        load_model(sparse_lm)
    found, expected = load_model(sparse_lm, "relu"), load_model(edited)
    assert found.facts == expected.facts and found.facts.activation == "relu"
    assert str(found.graph_module.graph) == str(expected.graph_module.graph)
    assert fingerprint(sparse_lm, "relu") == fingerprint(edited) == fingerprint(edited, "relu")
    assert read_config(sparse_lm, "relu") == read_config(edited)
    found.prove()


def test_a_model_of_a_known_family(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama with the weights of a ReLU model and silu in its config; FATReLU is put in as well."""
    asked: list[Raw] = []
    monkeypatch.setattr(hf, "prove", lambda raw, *rest: asked.append(raw))
    silu = _with_config(tiny_model, tmp_path / "silu", hidden_act="silu")
    fatrelu = _with_config(tiny_model, tmp_path / "fatrelu", hidden_act="fatrelu", hidden_act_param=0.25)
    ids = torch.arange(1, 20)
    for name, expected in (("relu", tiny_model), ("fatrelu(0.25)", fatrelu)):
        found = load_model(silu, name)
        assert found.facts.activation == name
        assert torch.equal(_logits(found, ids), _logits(load_model(expected), ids))
        found.prove()
    assert [raw["hidden_act"] for raw in asked] == ["relu", "fatrelu"], "proved is the model that was asked for"
    assert len({fingerprint(silu, name) for name in (None, "relu", "relu2", "fatrelu(0.25)", "fatrelu(0.5)")}) == 5
    assert fingerprint(silu, "silu") == fingerprint(silu, "swish") == fingerprint(silu)


def _logits(captured: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = materialize(captured.graph_module, captured.weights)(ids, torch.arange(len(ids)))
    return logits


@pytest.mark.slow("exports models of transformers")
def test_a_class_that_only_transformers_knows(tmp_path: Path) -> None:
    config = small_config("gpt2")
    small_model(config).save_pretrained(tmp_path)  # type: ignore[operator]
    config.activation_function = "relu"
    eager, ids = small_model(config), torch.arange(1, 20)
    found = load_model(tmp_path, "relu")
    assert found.facts.activation == "relu" != load_model(tmp_path).facts.activation
    with torch.no_grad():
        expected = call_model(eager, ids.unsqueeze(0), torch.arange(len(ids)).unsqueeze(0))[0]
    torch.testing.assert_close(_logits(found, ids), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    found.prove()
    assert fingerprint(tmp_path, "relu") != fingerprint(tmp_path)


@pytest.mark.slow("exports models of transformers")
def test_a_class_that_computes_another_whatever_its_config_says(tmp_path: Path) -> None:
    small_model(small_config("bloom")).save_pretrained(tmp_path)  # type: ignore[operator]
    assert load_model(tmp_path, "gelu_new").facts.activation == "gelu_tanh"
    with pytest.raises(UnsupportedModelError, match=r"^--activation relu: BloomForCausalLM computes gelu_tanh whatev"):
        load_model(tmp_path, "relu")


def test_a_graph_that_shows_no_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model(small_config("gpt2")).save_pretrained(tmp_path)  # type: ignore[operator]
    monkeypatch.setattr(hf, "block_activations", lambda captured: [])
    with pytest.raises(UnsupportedModelError, match="no feed-forward block that shows its activation"):
        load_model(tmp_path, "relu")


@pytest.mark.slow("captures a model twice")
def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_example(file, EXAMPLES["llama"], build(EXAMPLES["llama"]))
    assert load_model(file).facts.activation == "silu"
    found = load_model(file, "relu")
    assert found.facts.activation == "relu"
    found.prove()
    assert fingerprint(file, "relu") != fingerprint(file) == fingerprint(file, "silu")
    assert read_config(file, "relu") == read_config(file) | {"hidden_act": "relu"}
