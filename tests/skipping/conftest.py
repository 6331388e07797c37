"""Predicted graphs with limits, of variants of tests/helpers/families.py."""

import functools
from collections.abc import Callable

import pytest
from torch.fx import GraphModule

from helpers.families import config_of
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors

Limited = Callable[[str], GraphModule]


@pytest.fixture(scope="session")
def canonical() -> Limited:
    """The canonical graph of a variant."""
    from picompile.frontend.hf import capture_config

    return functools.cache(lambda name: canonicalize(capture_config(config_of(name, 2))))


@pytest.fixture(scope="session")
def limited(canonical: Limited) -> Limited:
    """The predicted graph of a variant, with limits wherever its blocks can have some."""
    from picompile.skipping.limits import skipping_sites
    from picompile.skipping.options import SITES

    @functools.cache
    def make(name: str) -> GraphModule:
        insert = skipping_sites(canonical(name), SITES).insertion(InsertPredictors("none"))
        return insert(canonical(name)).graph_module

    return make
