"""Captures are slow: each model is captured once for all tests."""

import functools
from collections.abc import Callable

import pytest

from helpers import families
from helpers.canonical import Model, canonicalize
from helpers.one_thread import one_thread
from picompile.frontend.hf import load_model

__all__ = ["model", "one_thread"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """`model(name)`: a variant, its checkpoint saved in float16."""

    @functools.cache
    def get(name: str) -> Model:
        folder = tmp_path_factory.mktemp(name)
        families.save(name, families.build(name), folder)
        captured = load_model(folder)
        # Built anew: saving in float16 has rounded the frequencies of the one that was saved.
        return Model(families.build(name), captured, canonicalize(captured.graph_module))

    return get
