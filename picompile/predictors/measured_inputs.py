"""A hash of everything that a measurement of a graph depends on, so that it is measured only once."""

import hashlib
import json

from torch.fx import GraphModule

from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.operands import PREDICTORS
from picompile_runtime.version import __version__


def inputs_sha256(graph_module: GraphModule, weights: WeightSource, *parts: str) -> str:
    """Return a hash of a graph, of its predictors' own parameters, of this version, and of `parts`.

    The parts name all else, the checkpoint among it: of its weights nothing is read.
    """
    digest = hashlib.sha256()
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for name in sorted(name for name in read if name.startswith(PREDICTORS)):
        digest.update(name.encode() + weights.load(name).contiguous().numpy().tobytes())
    whole = [graph_text(graph_module), __version__, *parts, digest.hexdigest()]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()
