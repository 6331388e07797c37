import subprocess
import sys

import pytest
import torch

from picompile.testing import LLAMA, OPT, build, structure
from picompile_passes.base import copy_graph_module
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import LINEAR, RMS_NORM
from picompile_passes.passes.insert_predictors import InsertPredictors


def change_argument(graph_module):
    next(iter(calls(graph_module.graph, RMS_NORM))).update_arg(2, 0.5)


def add_metadata(graph_module):
    next(iter(calls(graph_module.graph, LINEAR))).meta["note"] = 1


def change_notes(graph_module):
    graph_module.graph.output_node().meta["notes"]["seen"] = 2


def write_to_constant(graph_module):
    graph_module.inverse_frequency.mul_(2)


def replace_parameter(graph_module):
    graph_module.lm_head.weight = torch.nn.Parameter(torch.empty(50, 24, device="meta"))


def rename(graph_module):
    next(iter(calls(graph_module.graph, LINEAR))).name = "other"


@pytest.mark.parametrize(
    "change", [change_argument, add_metadata, change_notes, write_to_constant, replace_parameter, rename]
)
def test_every_change_of_a_graph_changes_its_structure(change):
    graph_module = build(LLAMA)
    graph_module.graph.output_node().meta["notes"] = {"seen": 1}
    was = structure(graph_module)
    assert structure(graph_module) == was
    change(graph_module)
    assert structure(graph_module) != was


def test_a_copy_has_the_same_structure_and_a_result_another():
    graph_module = build(OPT)
    assert structure(copy_graph_module(graph_module)) == structure(graph_module)
    assert structure(InsertPredictors()(graph_module).graph_module) != structure(graph_module)


def test_without_hypothesis_one_line_says_what_to_install():
    code = "import sys; sys.modules['hypothesis'] = None\nimport picompile.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "ImportError: picompile.testing needs hypothesis: pip install 'picompile[testing]'"
