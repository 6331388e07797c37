"""How much of a text the gate reads."""

from picompile.predictors.accuracy import first_windows

WINDOWS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


def test_as_many_tokens_as_asked_for() -> None:
    assert first_windows(WINDOWS, 100) == WINDOWS
    assert first_windows(WINDOWS, 7) == [[1, 2, 3, 4], [5, 6, 7]]
    assert first_windows([[], [1, 2]], 7) == [[1, 2]]
    assert first_windows([], 7) == []


def test_windows_that_are_too_long_are_cut() -> None:
    assert first_windows(WINDOWS, 100, 10) == WINDOWS
    assert first_windows(WINDOWS, 6, 3) == [[1, 2, 3], [5, 6, 7]]
    assert first_windows(WINDOWS, 6, 2) == [[1, 2], [3, 4], [5, 6]]


def test_a_single_id_tells_nothing() -> None:
    assert first_windows(WINDOWS, 5) == [[1, 2, 3, 4]]
    assert first_windows(WINDOWS, 1) == []
