import subprocess
import sys

import pytest
import torch

from picompile.testing import LLAMA, build, structure
from picompile_passes.base import copy_graph_module
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import LINEAR


def linear(graph_module):
    return next(calls(graph_module.graph, LINEAR))


@pytest.mark.parametrize(
    "change",
    [
        lambda g: linear(g).update_arg(2, 0.5),
        lambda g: linear(g).meta.update(note=1),
        lambda g: g.graph.output_node().meta["notes"].update(seen=2),
        lambda g: g.inverse_frequency.mul_(2),
        lambda g: setattr(g.lm_head, "weight", torch.nn.Parameter(torch.empty(50, 24, device="meta"))),
        lambda g: setattr(linear(g), "name", "other"),
    ],
    ids=["argument", "metadata", "notes", "constant", "parameter", "name"],
)
def test_every_change_of_a_graph_changes_its_structure(change):
    graph_module = build(LLAMA)
    graph_module.graph.output_node().meta["notes"] = {"seen": 1}
    was = structure(graph_module)
    assert structure(graph_module) == structure(copy_graph_module(graph_module)) == was
    change(graph_module)
    assert structure(graph_module) != was


def test_without_hypothesis_one_line_says_what_to_install():
    code = "import sys; sys.modules['hypothesis'] = None\nimport picompile.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "ImportError: picompile.testing needs hypothesis: pip install 'hypothesis>=6.115'"
