"""Profiles that several tests of the command line plan with."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.support import BUNDLED_MODEL, BuildOnce
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.run import profile_model


def _profile(model: Path) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        text = folder.with_name(f"{folder.name}.txt")
        text.write_text(" ".join(random.choices(["def", "return", "x", "=", "self.", "import", "(y)"], k=2500)))
        profile_model(model, folder, ProfileOptions((text,), tokens=1024, samples=9, window=128))

    return make


@pytest.fixture(scope="session")
def tiny_profile(build_once: BuildOnce, tiny_model: Path) -> Path:
    """A profile of `tiny_model`. Tests must not change it."""
    return build_once("plan-tiny-profile", _profile(tiny_model))


@pytest.fixture(scope="session")
def bundled_profile(build_once: BuildOnce) -> Path:
    """A profile of the bundled model. Tests must not change it."""
    return build_once("plan-bundled-profile", _profile(BUNDLED_MODEL))
