"""Whole numbers: those that are none, and those with more digits than Python reads."""

import pytest

from picompile.config import CompileOptions
from picompile.errors import UsageError
from picompile.predictors.profile import ProfileOptions
from picompile.predictors.train import TrainOptions
from picompile.quantities import parse_count, shortened


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("9" * 18, 10**18 - 1),
        ("0" * 5000 + "12", 12),
        ("9" * 19, None),
        ("9" * 5000, None),
        ("", None),
        ("-1", None),
        ("1.0", None),
        ("²", None),
        ("٣", None),
    ],
)
def test_counts_are_parsed(text: str, number: int | None) -> None:
    assert parse_count(text) == number


def test_long_texts_are_shortened() -> None:
    assert shortened("x" * 40) == "x" * 40
    assert shortened("x" * 41) == "x" * 40 + "…"


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (CompileOptions, "context", 64.0),
        (CompileOptions, "sequences", 2.5),
        (CompileOptions, "chunk", True),
        (CompileOptions, "gate_tokens", "4096"),
        (ProfileOptions, "tokens", 1024.0),
        (ProfileOptions, "window", 128.0),
        (TrainOptions, "ranks", 8.0),
        (TrainOptions, "jobs", 1.5),
    ],
)
def test_options_that_must_be_whole_numbers(options: type, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"must be a whole number, not {value!r}"):
        options(**{name: value})
