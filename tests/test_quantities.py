"""Sizes, bandwidths and whole numbers as people write them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picompile.config import CompileOptions
from picompile.errors import UsageError
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.train.options import TrainOptions
from picompile.quantities import parse_bandwidth, parse_budget, parse_bytes, parse_count, shortened

UNITS = {"B": 1, "Gi": 2**30}
UNITS |= {letter + end: 2 ** (10 * power) for power, letter in enumerate("KMGT", 1) for end in ("", "iB")}
UNITS |= {f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", 1)}
NUMBERS = st.decimals(0, 9999, places=3, allow_nan=False).map(lambda value: f"{value:f}")


def anycase(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from([text, text.lower(), text.upper()])


@given(number=NUMBERS, unit=st.sampled_from(sorted(UNITS)), data=st.data())
def test_sizes(number: str, unit: str, data: st.DataObject) -> None:
    text = number + data.draw(st.sampled_from(["", " "])) + data.draw(anycase(unit))
    assert parse_bytes(text, "--size") == int(Fraction(number) * UNITS[unit])


def test_sizes_by_example() -> None:
    """The last is one that floating point would round."""
    examples = {"8GB": 8 * 10**9, "24G": 24 * 2**30, ".5k": 512, "1.B": 1, "1125899.906842623GB": 1125899906842623}
    examples |= {"0": 0, "0.0": 0, "1048576": 2**20, " 68719476736 ": 64 * 2**30}
    for text, expected in examples.items():
        assert parse_bytes(text, "--size") == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64", "64 is 64 bytes; did you mean 64GiB?"),
        (" 1 ", "1 is 1 byte; did you mean 1GiB?"),
        ("7.5", "7.5 is 7 bytes; did you mean 7.5GiB?"),
        ("65536", "65536 is 65536 bytes; did you mean 65536MiB?"),
        ("1048575", "1048575 is 1048575 bytes; did you mean 1048575MiB?"),
    ],
)
def test_small_numbers_without_a_unit_are_refused(text: str, says: str) -> None:
    for parse in (parse_bytes, _share):
        with pytest.raises(UsageError) as caught:
            parse(text, "--size")
        assert str(caught.value) == f"--size {says}"


ABSURD = ["", " ", "-3GiB", "+3GiB", "nan", "inf", "1e400GiB", "1e3", "0x10", "∞", "12 parsecs", "GiB", "1 2", "1,5GiB"]
ABSURD += ["8i", "8iB", "1_000", "٣GiB", "8GiB8", "8 G B", "8GiB\n9", "9" * 39 + "G", "9" * 5000, "1." + "0" * 9999]
ABSURD += ["4EiB", "1000000PB", "\udc80", "8GiB\0", "³GiB", "%", "-5%", "101%", "nan%", "1e1%", "5%%", "50%GiB"]


NO_BANDWIDTHS = ["0", "0.0GB/s", "100Gb/s", "100gb/s", "8GB", "8GiB", "67.2GBps", "iB/s", "8iB/s", "/s"]


def _share(text: str, option: str) -> int:
    return parse_budget(text, 2**34, option)


def test_absurd_input_is_refused_by_name() -> None:

    calls = [(parse, text) for text in ABSURD for parse in (parse_bytes, parse_bandwidth, _share)]
    for parse, text in (*calls, *((parse_bandwidth, text) for text in NO_BANDWIDTHS)):
        with pytest.raises(UsageError, match=r"^--size: ") as caught:
            parse(text, "--size")
        assert caught.value.exit_code == 2
        message = str(caught.value)
        assert len(message) < 250 and "\n" not in message
        message.encode()
    for text in ("auto", "80%"):
        with pytest.raises(UsageError, match=r"^--host-memory: .*give a size"):
            parse_budget(text, None, "--host-memory")


@given(text=st.text(max_size=60), available=st.none() | st.integers(0, 2**50))
def test_any_text_is_a_size_or_refused(text: str, available: int | None) -> None:
    for value in (
        _or_refused(lambda: parse_bytes(text, "--size")),
        _or_refused(lambda: parse_budget(text, available, "--size")),
        _or_refused(lambda: parse_bandwidth(text, "--size")),
    ):
        assert value is None or 0 <= value <= 2**60


def _or_refused(parse: object) -> float | None:
    try:
        return parse()  # type: ignore[no-any-return, operator]
    except UsageError as error:
        assert str(error).startswith(("--size: ", "--size ")) and "\n" not in str(error)
        return None


@given(percent=st.decimals(0, 100, places=2, allow_nan=False), available=st.integers(0, 2**50))
def test_shares_of_a_budget(percent: object, available: int) -> None:
    assert parse_budget(f"{percent:f}%", available, "--size") == int(Fraction(f"{percent:f}") * available / 100)
    for text in ("auto", "AUTO", " auto ", "100%", "100.0 %"):
        assert parse_budget(text, available, "--size") == available


@pytest.mark.parametrize(
    ("text", "expected"),
    [("67.2", 67.2e9), ("67.2 GB/s", 67.2e9), ("62.5GiB/s", 62.5 * 2**30), ("500MB/s", 5e8), ("7B/s", 7.0)],
)
def test_bandwidths(text: str, expected: float) -> None:
    assert parse_bandwidth(text, "--host-bandwidth") == pytest.approx(expected, rel=1e-15)


def test_counts_are_parsed() -> None:
    for text, number in {"0": 0, "007": 7, "9" * 18: 10**18 - 1, "0" * 5000 + "12": 12}.items():
        assert parse_count(text) == number
    for text in ("9" * 19, "9" * 5000, "", "-1", "1.0", "²", "٣"):
        assert parse_count(text) is None
    assert [shortened("x" * length) for length in (40, 41)] == ["x" * 40, "x" * 40 + "…"]


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (CompileOptions, "context", 64.0),
        (CompileOptions, "sequences", 2.5),
        (CompileOptions, "chunk", True),
        (CompileOptions, "check_tokens", "4096"),
        (ProfileOptions, "tokens", 1024.0),
        (ProfileOptions, "window", 128.0),
        (TrainOptions, "ranks", 8.0),
        (TrainOptions, "jobs", 1.5),
    ],
)
def test_options_that_must_be_whole_numbers(options: type, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"must be a whole number, not {value!r}"):
        options(**{name: value})
