"""Names in other spellings, and names that are nearly right."""

import pytest

from picompile.errors import UsageError
from picompile.spelling import did_you_mean, find_name, squashed
from picompile.synth.dense import DENSE
from picompile.synth.mixtures import MIXTURES
from picompile.synth.shapes import SHAPES, find_config, find_shape

NAMES = ("opt-6.7b", "opt-66b", "a_b", "A-B")


def test_names_are_found_in_any_case_and_never_guessed() -> None:
    for text, name in {"opt-66b": "opt-66b", "OPT 6.7B": "opt-6.7b", "a_b": "a_b", "ab": None, "opt": None}.items():
        assert find_name(text, NAMES) == name


def test_near_names_are_the_nearest_ones() -> None:
    assert did_you_mean("opt-67b", NAMES) == "did you mean opt-6.7b or opt-66b?"
    assert did_you_mean("xyz", NAMES) == did_you_mean("", NAMES) == ""


def test_shapes_in_other_spellings() -> None:
    known = (*SHAPES, *MIXTURES, *DENSE)
    assert len({squashed(name) for name in known}) == len(known)
    assert find_config("OPT-6.7B") == find_config("opt-6.7b") and find_config("Qwen3 4B")[0] == "qwen3-4b"
    assert find_shape("LLaMA_13b") == SHAPES["llama-13b"]
    with pytest.raises(UsageError, match=r"shape 'qwen3-8b'; did you mean qwen3-4b or .*\? docs/cli.md"):
        find_config("qwen3-8b")
    with pytest.raises(UsageError, match=r"unknown shape 'nosuch'.* docs/cli.md, plan, lists the names"):
        find_config("nosuch")
