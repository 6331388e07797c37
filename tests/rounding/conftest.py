from collections.abc import Callable, Sequence

import pytest
from torch.fx import GraphModule

from helpers.families import VARIANTS
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize

Quantized = Callable[..., GraphModule]


@pytest.fixture(scope="session")
def quantized() -> Quantized:
    """The quantized graph of a variant of tests/helpers/families.py, with `insert` for its predictors."""
    import transformers

    from picompile.frontend import capture_config

    captured: dict[str, GraphModule] = {}

    def make(name: str, form: str, insert: Sequence[object] = (InsertPredictors(),)) -> GraphModule:
        if name not in captured:
            variant = VARIANTS[name]
            config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
            captured[name] = capture_config(config | {"architectures": [variant.model_class]} | dict(variant.rename))
        graph = captured[name]
        for pass_ in (*CANONICALIZE, *insert, Quantize(form)):
            graph = pass_(graph).graph_module
        return graph

    return make
