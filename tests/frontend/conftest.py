"""Captures are slow: each model is captured once for all tests."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from helpers import families
from helpers.canonical import Model, canonicalize
from picompile.frontend import load_model


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


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These tensors are tiny: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
