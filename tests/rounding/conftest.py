import functools
from collections.abc import Callable, Sequence

import pytest
from torch.fx import GraphModule

from helpers.families import config_of
from picompile_passes.base import Pass
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize

Transformed = Callable[..., GraphModule]


@pytest.fixture(scope="session")
def transformed() -> Transformed:
    """The graph of a variant of tests/helpers/families.py in canonical form, behind some more passes."""
    from picompile.frontend.hf import capture_config

    captured = functools.cache(lambda name: capture_config(config_of(name, 2)))

    def make(name: str, *passes: Pass) -> GraphModule:
        graph = captured(name)
        for pass_ in (*CANONICALIZE, *passes):
            graph = pass_(graph).graph_module
        return graph

    return make


@pytest.fixture(scope="session")
def quantized(transformed: Transformed) -> Transformed:
    """The quantized graph of a variant, with the passes `insert` before quantization."""

    def make(name: str, form: str, insert: Sequence[Pass] = (InsertPredictors(),)) -> GraphModule:
        return transformed(name, *insert, Quantize(form))

    return make
