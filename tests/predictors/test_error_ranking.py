"""Who is to blame for what predictors cost."""

from picompile.predictors.accuracy import rank_layers_by_error


def test_blame_falls_on_those_that_miss_most() -> None:
    assert rank_layers_by_error({0: 1.0, 1: 6.0, 2: 3.0, 3: 0.0}) == [1, 2]
    assert rank_layers_by_error({4: 1e-9}) == [4]
    assert rank_layers_by_error({5: 1.0, 3: 1.0, 4: 1.0}) == [3, 4, 5]


def test_nobody_is_to_blame_for_nothing() -> None:
    assert rank_layers_by_error({0: 0.0, 1: 0.0}) == rank_layers_by_error({}) == []
