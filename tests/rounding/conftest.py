from collections.abc import Callable, Sequence

import pytest
from torch.fx import GraphModule

from helpers.families import VARIANTS
from picompile_passes.base import Pass
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize

CapturedVariant = Callable[[str], GraphModule]


@pytest.fixture(scope="session")
def captured_variant() -> CapturedVariant:
    """The captured graph of a variant of tests/helpers/families.py."""
    import transformers

    from picompile.frontend import capture_config

    made: dict[str, GraphModule] = {}

    def make(name: str) -> GraphModule:
        if name not in made:
            variant = VARIANTS[name]
            config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
            made[name] = capture_config(config | {"architectures": [variant.model_class]} | dict(variant.rename))
        return made[name]

    return make


@pytest.fixture(scope="session")
def quantized(captured_variant: CapturedVariant) -> Callable[..., GraphModule]:
    """The quantized graph of a variant, with the passes `insert` before quantization."""

    def make(name: str, form: str, insert: Sequence[Pass] = (InsertPredictors(),)) -> GraphModule:
        graph = captured_variant(name)
        for pass_ in (*CANONICALIZE, *insert, Quantize(form)):
            graph = pass_(graph).graph_module
        return graph

    return make
