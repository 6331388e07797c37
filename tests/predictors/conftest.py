import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 bytes of words: as many tokens for a tokenizer of bytes.

    The same in every run: with one text in twenty, a neuron is so near its threshold that eager arithmetic rounds it
    to the other side.
    """
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    words = ["neuron", "gate", "up", "down", "hot", "cold", "mask", "fires", "and", "the", "is", "not"]
    path.write_text(" ".join(random.Random(0).choices(words, k=3000))[:3000])
    return path
