"""Who is to blame for what predictors cost."""

from picompile.predictors.accuracy import rank_layers_by_error


def test_layers_that_miss_most_rank_first() -> None:
    assert rank_layers_by_error({0: 1.0, 1: 6.0, 2: 3.0, 3: 0.0}) == [1, 2]
    assert rank_layers_by_error({4: 1e-9}) == [4]
    assert rank_layers_by_error({5: 1.0, 3: 1.0, 4: 1.0}) == [3, 4, 5]


def test_layers_that_miss_nothing_are_not_ranked() -> None:
    assert rank_layers_by_error({0: 0.0, 1: 0.0}) == rank_layers_by_error({}) == []
