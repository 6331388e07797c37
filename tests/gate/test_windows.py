"""How much of a text the gate reads."""

from picompile.gate import LayerAccuracy, first_windows, to_blame

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


def _layer(number: int, missed_energy: float) -> LayerAccuracy:
    return LayerAccuracy(number, "learned", 8, 0.9, 0.9, 0.9, 0.1, 0.1, missed_energy)


def test_blame_falls_on_those_that_miss_most() -> None:
    assert to_blame([_layer(0, 1.0), _layer(1, 6.0), _layer(2, 3.0), _layer(3, 0.0)]) == [1, 2]
    assert to_blame([_layer(0, 0.0), _layer(1, 0.0)]) == []
    assert to_blame([_layer(4, 1e-9)]) == [4]
