"""Limits of one price, and the search for it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from picompile.errors import UnsupportedModelError, UsageError
from picompile.progress import NoProgress
from picompile.skipping import SkippingOptions, skipping_sites
from picompile.skipping.limits import limits_at, no_limits, saved_weights
from picompile.skipping.search import Rise, SkippingSearch
from picompile.skipping.sensitivities import measure_sensitivities
from picompile.streaming import streamed_perplexity
from picompile.testing import RandomWeights, random_weights
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_FFN
from picompile_passes.passes.canonicalize import canonicalize

_WINDOWS = [torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6)]


def test_a_limit_is_where_a_byte_costs_its_price() -> None:
    sensitivities = {"predictors.layers.0.gate_limits": torch.tensor([0.5, 2.0, 1.0, 0.0])}
    limits = limits_at(sensitivities, {"predictors.layers.0.gate_limits": 64}, 0.25).tensors
    # A neuron that the text did not show to matter counts as a hundredth of the median.
    expected = torch.tensor([4.0, 1.0, 2.0, 2.0 / (0.01 * 0.5)])
    torch.testing.assert_close(limits["predictors.layers.0.gate_limits"], expected)


def test_what_a_value_saves(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    for node in calls(graph.graph, SPARSE_FFN):
        hidden = arguments(node)["down"].meta["val"].shape[1]
        saved = saved_weights(graph)
        assert saved[str(arguments(node)["gate_limits"].target)] == 2 * hidden
        assert saved[str(arguments(node)["output_limits"].target)] == hidden


def _search(graph, weights, bound: float, **more) -> SkippingSearch:
    sensitivities = measure_sensitivities(graph, weights, _WINDOWS[:2], 0, NoProgress())
    return SkippingSearch(graph, weights, sensitivities, _WINDOWS[2:], bound, NoProgress(), **more)


def test_the_largest_limits_within_the_bound(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=2)
    found = {bound: _search(graph, weights, bound).run() for bound in (0.001, 0.05)}
    assert found[0.001].price < found[0.05].price
    assert all(found[0.001].left_out[name] <= share for name, share in found[0.05].left_out.items())
    assert sum(found[0.05].left_out.values()) > 0
    whole = streamed_perplexity(graph, no_limits(graph).weights(weights), _WINDOWS[2:])
    for bound, each in found.items():
        perplexity = streamed_perplexity(graph, each.limits.weights(weights), _WINDOWS[2:])
        assert perplexity == pytest.approx(each.perplexity)
        assert math.log(perplexity / whole) == pytest.approx(each.rise.nats, abs=1e-6)
        assert each.rise.within(bound)


def test_what_was_tried_is_not_tried_again(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=2)
    kept: list[dict[int, Rise]] = []
    first = _search(graph, weights, 0.05, save=lambda tried: kept.append(dict(tried)))
    found = first.run()
    assert [len(each) for each in kept] == list(range(1, len(kept) + 1))
    again: list[dict[int, Rise]] = []
    second = _search(graph, weights, 0.05, tried=kept[-1], save=lambda tried: again.append(dict(tried)))
    assert second.run().price == found.price
    assert not again
    # The neighbour of the step that was found is too far.
    assert not min(rise.within(0.05) for rise in kept[-1].values())


def test_damaged_weights(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=2)
    search = _search(graph, weights, 0.05)
    tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    next(tensor for name, tensor in tensors.items() if "down_proj" in name).fill_(math.nan)
    search.weights = RandomWeights(tensors)
    with pytest.raises(UnsupportedModelError, match="not finite"):
        search.run()


def test_places_that_a_model_has(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("opt-pre-norm")
    assert all(arguments(node)["gate_limits"] is None for node in calls(graph.graph, SPARSE_FFN))
    assert all(arguments(node)["output_limits"] is not None for node in calls(graph.graph, SPARSE_FFN))


def test_places_that_no_model_has() -> None:
    import transformers

    from helpers.families import VARIANTS
    from picompile.frontend import capture_config

    variant = VARIANTS["opt-pre-norm"]
    config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
    canonical = canonicalize(capture_config(config | {"architectures": [variant.model_class]} | dict(variant.rename)))
    with pytest.raises(UsageError, match="nothing of this model can be skipped at gate"):
        skipping_sites(canonical, ("gate",))


@pytest.mark.parametrize(
    "wrong", [{"bound": 0.0}, {"bound": math.nan}, {"bound": math.inf}, {"tokens": 1}, {"sensitivity_tokens": 0}]
)
def test_options_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SkippingOptions(**{"bound": 0.01, **wrong})
