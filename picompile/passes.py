"""The names to write a pass with: `from picompile.passes import Pass`. The package itself is `picompile_passes`."""

from picompile_passes.base import Effect, Pass, PassResult, Stage, stage_of
from picompile_passes.errors import PassError, PassOptionError, StageError, UnsupportedGraphError, VerifyError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.nodes import arguments, attribute, calls, constant_nodes, is_call
from picompile_passes.graph.rewriter import Provenance, Rewriter
from picompile_passes.pipeline import Dump, Pipeline, Timings, each, verifying
from picompile_passes.predictors import PredictorKind, add_predictor_kind
from picompile_passes.verify import verify

__all__ = [
    "Dump",
    "Effect",
    "GraphBuilder",
    "Pass",
    "PassError",
    "PassOptionError",
    "PassResult",
    "Pipeline",
    "PredictorKind",
    "Provenance",
    "Rewriter",
    "Stage",
    "StageError",
    "Timings",
    "UnsupportedGraphError",
    "VerifyError",
    "add_predictor_kind",
    "arguments",
    "attribute",
    "calls",
    "constant_nodes",
    "each",
    "is_call",
    "stage_of",
    "verify",
    "verifying",
]
