from collections.abc import Callable

import pytest
from torch.fx import GraphModule

from helpers.families import VARIANTS
from picompile_passes.passes.canonicalize import CANONICALIZE

Canonical = Callable[[str], GraphModule]


@pytest.fixture(scope="session")
def canonical() -> Canonical:
    """The canonical graph of a variant of tests/helpers/families.py."""
    import transformers

    from picompile.frontend import capture_config

    made: dict[str, GraphModule] = {}

    def make(name: str) -> GraphModule:
        if name not in made:
            variant = VARIANTS[name]
            config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
            graph = capture_config(config | {"architectures": [variant.model_class]} | dict(variant.rename))
            for pass_ in CANONICALIZE:
                graph = pass_(graph).graph_module
            made[name] = graph
        return made[name]

    return make
