"""Files of mixtures that are written for measuring, which must be models that are read."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader

from benchmarks.peers.mixture import SHAPES, write
from picompile.errors import UnsupportedModelError
from picompile.frontend.hf import load_model
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, ROUTE
from picompile_passes.passes.canonicalize import canonical_form

SMALL = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "experts": 6, "chosen": 2}


NEMOTRON = "relu2-moe-1b-5b"


@pytest.mark.slow("captures a mixture per shape", but=("olmoe-1b",))
@pytest.mark.parametrize("name", [name for name in SHAPES if name != NEMOTRON])
def test_a_file_is_a_mixture_of_its_shape(name: str, tmp_path: Path) -> None:
    heads = {"kv_heads": 2} if name == "olmoe-1b-7b" else {}
    shape = replace(SHAPES[name], **SMALL | heads, neurons=32, vocabulary=300)
    write(shape, tmp_path / "made" / "model.gguf")
    captured = load_model(tmp_path / "made" / "model.gguf")
    graph = canonical_form(captured.graph_module).graph
    assert [arguments(node)["chosen"] for node in calls(graph, ROUTE)] == [2, 2]
    assert [tuple(arguments(node)["up"].meta["val"].shape) for node in calls(graph, FFN)] == [(6 * 32, 64)] * 2
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model.gguf"]


def test_a_file_that_llama_cpp_alone_reads_has_experts_without_a_gate(tmp_path: Path) -> None:
    write(replace(SHAPES[NEMOTRON], **SMALL, neurons=32, vocabulary=300, shared=32), tmp_path / "model.gguf")
    tensors = {tensor.name: tensor.shape.tolist() for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert {name for name in tensors if "_exps" in name} == {
        f"blk.{layer}.ffn_{part}_exps.weight" for layer in (1, 3) for part in ("up", "down")
    }
    assert tensors["blk.1.ffn_up_exps.weight"] == [64, 32, 6]
    assert tensors["blk.2.attn_q.weight"] == [64, 64]
    # The recurrent layer comes last.
    assert "blk.4.ssm_in.weight" in tensors and "blk.5.attn_norm.weight" not in tensors
    with pytest.raises(UnsupportedModelError, match="of the architecture nemotron_h_moe are not supported"):
        load_model(tmp_path / "model.gguf")
