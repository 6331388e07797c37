"""Architectures that records of our own read: each against the model that was written, in its class of transformers."""

import re
from pathlib import Path

import pytest
import torch

from helpers.gguf_architectures import ARCHITECTURE_EXAMPLES, FUSED, write_architecture
from helpers.gguf_files import build
from helpers.gguf_models import check_logits
from helpers.support import ROOT
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.architectures import ARCHITECTURES
from picompile.frontend.gguf.model import open_gguf
from picompile.frontend.gguf.transformers_tables import COMPILED
from picompile_passes.dialect import dequantize_rows

# Each of these has something that no other has: the others are slow tests.
QUICK = ("apertus", "cohere2", "gptneox", "granite_swa", "mistral3", "olmo2 with windows", "phi2", "smollm3")


def check(file: Path, name: str, fused: bool = False) -> None:
    example = ARCHITECTURE_EXAMPLES[name]
    model = build(example)
    write_architecture(file, example, model, fused=fused)
    opened = open_gguf(file)
    assert opened.config["architectures"] == [example.model_class]
    state = model.state_dict()
    for parameter in opened.tensors:
        # Only sums with 1 are rounded.
        torch.testing.assert_close(opened.load(parameter), state[parameter], rtol=1e-6, atol=2e-7)
    check_logits(model, opened)


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture(tmp_path: Path, name: str) -> None:
    check(tmp_path / "model.gguf", name)


@pytest.mark.slow("every other architecture; the fast ones have what distinguishes them")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURE_EXAMPLES if name not in QUICK])
def test_another_architecture(tmp_path: Path, name: str) -> None:
    check(tmp_path / "model.gguf", name)


@pytest.mark.slow("the fused tensors of each architecture that has them")
@pytest.mark.parametrize("name", [*FUSED, "llama with q/k/v biases"])
def test_fused_queries_keys_and_values(tmp_path: Path, name: str) -> None:
    check(tmp_path / "model.gguf", name, fused=True)


@pytest.mark.parametrize("name", ["granite", "phi2"])
def test_parts_and_moved_rows_are_packed_without_rounding(tmp_path: Path, name: str) -> None:
    """Rows of Q8_0 that are moved, or lie within a fused matrix, have the same numbers packed and dequantized."""
    example, file = ARCHITECTURE_EXAMPLES[name], tmp_path / "model.gguf"
    write_architecture(file, example, build(example), fused=name == "phi2", type_name="Q8_0")
    opened = open_gguf(file)
    for part in "qkv":
        parameter = f"model.layers.1.self_attn.{part}_proj.weight"
        packed, values = opened.packed(parameter, "q8"), opened.load(parameter)
        assert packed is not None and opened.tensors[parameter].type == "Q8_0"
        assert torch.equal(dequantize_rows(packed, "q8", values.shape[1]), values)


def test_each_record_has_an_example() -> None:
    from helpers.gguf_files import EXAMPLES

    tried = {example.architecture for example in (*ARCHITECTURE_EXAMPLES.values(), *EXAMPLES.values())}
    assert ARCHITECTURES.keys() <= tried | {"baichuan"}, "Baichuan's is InternLM2's, but for its layers"


def test_the_documentation_has_all() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    table = text.partition("\n| architectures | model |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()]
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == {*ARCHITECTURES, *COMPILED}


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("apertus", {"xielu.beta": [0.5, 0.25]}, "xielu.beta is not 0.5 in all layers"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is False"),
        ("cohere2", {"cohere2.rope.freq_base_swa": 5e4}, "cohere2.rope.freq_base_swa is 50000.0, which is not read"),
        ("mpt", {"mpt.attention.max_alibi_bias": 4.0}, "mpt.attention.max_alibi_bias is 4.0, which is not read"),
        ("olmo", {"olmo.attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 9.99.*which is not read"),
        (
            "olmo2 with windows",
            {"olmo2.attention.sliding_window_pattern": [True, False]},
            "sliding_window_pattern has 2 elements for 4 layers",
        ),
    ],
)
def test_values_that_a_class_does_not_have(tmp_path: Path, name: str, more: dict[str, object], says: str) -> None:
    example, file = ARCHITECTURE_EXAMPLES[name], tmp_path / "model.gguf"
    write_architecture(file, example, build(example), **more)
    with pytest.raises(UnsupportedModelError, match=says):
        open_gguf(file)
