"""Predicted graphs with limits, of variants of tests/helpers/families.py."""

from collections.abc import Callable

import pytest
from torch.fx import GraphModule

from helpers.families import VARIANTS
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors

Limited = Callable[[str], GraphModule]


@pytest.fixture(scope="session")
def limited() -> Limited:
    """The predicted graph of a variant, with limits wherever its blocks can have some."""
    import transformers

    from picompile.frontend import capture_config
    from picompile.skipping import skipping_sites
    from picompile.skipping.options import SITES

    made: dict[str, GraphModule] = {}

    def make(name: str) -> GraphModule:
        if name not in made:
            variant = VARIANTS[name]
            config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
            config |= {"architectures": [variant.model_class]} | dict(variant.rename)
            canonical = canonicalize(capture_config(config))
            graph = canonical
            for pass_ in skipping_sites(canonical, SITES).passes(InsertPredictors("none")):
                graph = pass_(graph).graph_module
            made[name] = graph
        return made[name]

    return make
