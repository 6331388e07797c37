"""Who is to blame for what predictors cost."""

from picompile.predictors.accuracy import to_blame


def test_blame_falls_on_those_that_miss_most() -> None:
    assert to_blame({0: 1.0, 1: 6.0, 2: 3.0, 3: 0.0}) == [1, 2]
    assert to_blame({4: 1e-9}) == [4]
    assert to_blame({5: 1.0, 3: 1.0, 4: 1.0}) == [3, 4, 5]


def test_nobody_is_to_blame_for_nothing() -> None:
    assert to_blame({0: 0.0, 1: 0.0}) == to_blame({}) == []
