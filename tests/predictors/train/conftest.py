import random
from pathlib import Path

import pytest

from helpers.support import BuildOnce


@pytest.fixture(scope="session")
def small_profile(build_once: BuildOnce, tiny_model: Path) -> Path:
    """A profile of `tiny_model`. Tests must not change it."""
    from picompile.predictors.profile.options import ProfileOptions
    from picompile.predictors.profile.run import profile_model
    from picompile.predictors.profile.text import CalibrationText

    words = ["neuron", "gate", "up", "down", "hot", "cold", "mask", "fires", "and", "the", "is", "not"]
    text = CalibrationText("words", " ".join(random.choices(words, k=4000)))
    options = ProfileOptions((text,), tokens=3000, samples=1500, window=64, held_out_tokens=512)
    return build_once("small-profile", lambda folder: profile_model(tiny_model, folder, options) and None)
