"""The artifact that is deployed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.support import BuildOnce, compile_for_test, save_tiny_llama


@pytest.fixture(scope="session")
def artifact(build_once: BuildOnce) -> Path:
    """A model of random weights, with a token for each byte, for four sequences of 1024 tokens."""

    def make(folder: Path) -> None:
        model = folder.with_name("deployed-model")
        save_tiny_llama(model, max_position_embeddings=1024)
        compile_for_test(model, folder, quant="f16", context=1024, sequences=4)

    return build_once("deployed-artifact", make)
