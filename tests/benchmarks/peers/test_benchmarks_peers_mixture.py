"""Files of mixtures that are written for measuring, which must be models that are read."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.mixture import SHAPES, write
from picompile.frontend.hf import load_model
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, ROUTE
from picompile_passes.passes.canonicalize import canonical_form

SMALL = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "experts": 6, "chosen": 2}


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_file_is_a_mixture_of_its_shape(name: str, tmp_path: Path) -> None:
    heads = {"kv_heads": 2} if name == "olmoe-1b-7b" else {}
    shape = replace(SHAPES[name], **SMALL | heads, neurons=32, vocabulary=300)
    write(shape, tmp_path / "made" / "model.gguf")
    captured = load_model(tmp_path / "made" / "model.gguf")
    graph = canonical_form(captured.graph_module).graph
    assert [arguments(node)["chosen"] for node in calls(graph, ROUTE)] == [2, 2]
    assert [tuple(arguments(node)["up"].meta["val"].shape) for node in calls(graph, FFN)] == [(6 * 32, 64)] * 2
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model.gguf"]
