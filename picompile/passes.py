"""All that a pass is written with, for `from picompile.passes import Pass, …`; docs/write_a_pass.md shows how.

| to | take |
| --- | --- |
| write a pass | `Pass`, `Rewriter`, `Stage`, `Effect`; `PassResult` and `Provenance` for annotations |
| read a graph | `calls`, `is_call`, `arguments`, `attribute`, `constant_nodes`, `stage_of`, `graph_text` |
| name an operator | `ADD`, `TRANSPOSE`, `INDEX_SELECT` of aten, and `EMBEDDING` to `DEQUANTIZE` of the dialect |
| find the weights of a node | `NEURON_ROWS`, `matrix_operands`, `gating_side`, `gating_weights` |
| run a graph with weights | `materialize`, `evaluate_constant`, `WeightSource` |
| run passes | `canonicalize`, `Pipeline`, `make_pass`, `CANONICALIZE`; `PASSES` has all by name |
| name our passes | `InsertPredictors`, `Partition`, `Quantize` |
| watch passes run | the hooks `verifying`, `Dump` and `Timings`; `each` joins several |
| test a pass | `GraphBuilder`, `verify` and `picompile.testing` |
| add a predictor kind | `PredictorKind`; `PREDICTOR_KINDS` has all by name, `PREDICTOR_KINDS.add` one more |
| add an operator | `operator`; `OPERATORS` has an `Operator` by name, `operator_of` by what a node calls |
| raise and catch errors | `PassOptionError` and `UnsupportedGraphError` for the user; `PassesError` is the root |
"""

from picompile_passes.base import Effect, Pass, PassResult, Stage, stage_of
from picompile_passes.dialect import OPERATORS, Operator, operator, operator_of
from picompile_passes.errors import (
    PassError,
    PassesError,
    PassOptionError,
    PropagateError,
    RegistryError,
    RewriteError,
    StageError,
    UnsupportedGraphError,
    VerifyError,
)
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.materialize import WeightSource, evaluate_constant, materialize
from picompile_passes.graph.nodes import arguments, attribute, calls, constant_nodes, is_call
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    DEQUANTIZE,
    DIVIDE_BY_RMS,
    ELEMENTWISE,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LAYER_NORM,
    LINEAR,
    NEURON_ROWS,
    PREDICT,
    QUANTIZE,
    RMS_NORM,
    ROTARY,
    SPARSE_FFN,
    TRANSPOSE,
    gating_side,
    gating_weights,
    matrix_operands,
)
from picompile_passes.graph.rewriter import Provenance, Rewriter
from picompile_passes.passes.canonicalize import CANONICALIZE, canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Dump, Pipeline, Timings, each, verifying
from picompile_passes.predictors import PREDICTOR_KINDS, PredictorKind
from picompile_passes.registry import PASSES, find_pass, make_pass
from picompile_passes.verify import verify

__all__ = [
    "ADD",
    "ATTENTION",
    "CANONICALIZE",
    "DEQUANTIZE",
    "DIVIDE_BY_RMS",
    "ELEMENTWISE",
    "EMBEDDING",
    "FFN",
    "INDEX_SELECT",
    "LAYER_NORM",
    "LINEAR",
    "NEURON_ROWS",
    "OPERATORS",
    "PASSES",
    "PREDICT",
    "PREDICTOR_KINDS",
    "QUANTIZE",
    "RMS_NORM",
    "ROTARY",
    "SPARSE_FFN",
    "TRANSPOSE",
    "Dump",
    "Effect",
    "GraphBuilder",
    "InsertPredictors",
    "Operator",
    "Partition",
    "Pass",
    "PassError",
    "PassOptionError",
    "PassResult",
    "PassesError",
    "Pipeline",
    "PredictorKind",
    "PropagateError",
    "Provenance",
    "Quantize",
    "RegistryError",
    "RewriteError",
    "Rewriter",
    "Stage",
    "StageError",
    "Timings",
    "UnsupportedGraphError",
    "VerifyError",
    "WeightSource",
    "arguments",
    "attribute",
    "calls",
    "canonicalize",
    "constant_nodes",
    "each",
    "evaluate_constant",
    "find_pass",
    "gating_side",
    "gating_weights",
    "graph_text",
    "is_call",
    "make_pass",
    "materialize",
    "matrix_operands",
    "operator",
    "operator_of",
    "stage_of",
    "verify",
    "verifying",
]
