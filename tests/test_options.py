"""Options: what a field declares is what the constructor checks and what the docstring says."""

from dataclasses import dataclass

import pytest

from picompile import CompileOptions
from picompile.errors import UsageError
from picompile.options import check_options, documented, one_of, option, options_of
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.train.options import TrainOptions
from picompile.quantities import parse_share


@documented
@dataclass(frozen=True)
class Few:
    """Some options."""

    count: int | None = option(None, "How many.", least=1, most=9)
    share: float = option("5%", "How much.", parse=parse_share, above=0, below=1)
    kind: str = option("a", "Which.", choices=("a", "b"))
    plain: str = "no option"

    def __post_init__(self) -> None:
        check_options(self)


def test_defaults_are_values() -> None:
    assert Few() == Few(None, 0.05, "a")
    assert {each.name: declared.written for each, declared in options_of(Few)} == {
        "count": None,
        "share": "5%",
        "kind": None,
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"count": 0}, "count must be at least 1 and at most 9, not 0"),
        ({"count": 10}, "count must be at least 1"),
        ({"count": True}, "count must be a whole number"),
        ({"share": 0.0}, "share must be above 0 and below 1, not 0.0"),
        ({"share": float("nan")}, "share must be"),
        ({"kind": "c"}, "unknown kind 'c'; known are a, b"),
    ],
)
def test_other_values_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Few(**wrong)  # type: ignore[arg-type]


def test_limits_are_values() -> None:
    assert [Few(count=count).count for count in (1, 9)] == [1, 9]


def test_docstrings_name_every_option() -> None:
    assert Few.__doc__ == "Some options.\n\nAttributes:\n    count: How many.\n    share: How much.\n    kind: Which."
    for kind in (CompileOptions, ProfileOptions, TrainOptions):
        assert all(f"    {each.name}: {declared.help}" in str(kind.__doc__) for each, declared in options_of(kind))


def test_choices_as_text() -> None:
    assert [one_of(names) for names in (("a",), ("a", "b"), ("a", "b", "c"))] == ["a", "a or b", "a, b or c"]
