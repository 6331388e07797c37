"""`check_pass` and `check_run`: the property suite for any pass."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from picompile.testing.properties import PROPERTIES, Snapshot, Trial
from picompile.testing.strategies import graphs as graphs_of
from picompile.testing.weights import random_weights
from picompile_passes.base import Effect, GraphPass, PassResult, Stage
from picompile_passes.errors import is_for_the_user
from picompile_passes.graph.dump import graph_text
from picompile_passes.graph.materialize import WeightSource

PassChoice = GraphPass | st.SearchStrategy[Any] | Callable[[GraphModule], st.SearchStrategy[Any]]


# Graphs take a while to make.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


class PropertyError(AssertionError):
    """A pass breaks one of `PROPERTIES`. The text names the property, the pass, and the fault."""

    def __init__(self, name: str, pass_: GraphPass, fault: str) -> None:
        self.property = name
        super().__init__(f"property {name} does not hold for {pass_!r}: {fault}")


def check_pass(
    pass_: PassChoice,
    *,
    graphs: st.SearchStrategy[GraphModule] | None = None,
    weights: Callable[[GraphModule, int], WeightSource] = random_weights,
    bound: float | None = None,
    may_refuse: bool = True,
    max_examples: int = 30,
    shrink: bool = False,
) -> None:
    """Run `pass_` on random graphs and check all of `PROPERTIES`. Raises `PropertyError` for one that does not hold.

    `pass_` is a pass, a strategy of passes, or a function from a graph to a strategy of passes (for options that depend
    on the graph); the last needs `graphs`. By default the graphs are of the stages that the pass takes. `weights(graph,
    seed)` are what it computes with. A pass that rounds needs either weights that need no rounding, or a `bound` on
    the relative error of the logits in the 2-norm. `may_refuse` allows the pass to raise an error for the user, such as
    `UnsupportedGraphError`; such graphs are passed over. `max_examples` is hypothesis's; with `shrink` a failing
    example is made smaller, which can take minutes. All else is as its profile says, but that there is no deadline.
    """
    _check_usage(pass_, graphs, weights, bound)

    phases = [phase for phase in settings().phases if shrink or phase not in (Phase.shrink, Phase.explain)]

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=_SLOW, phases=phases)
    @given(data=st.data(), seed=st.integers(0, 2**16))
    def suite(data: st.DataObject, seed: int) -> None:
        chosen, before = _draw(data, pass_, graphs)
        note(f"{chosen!r}\n{graph_text(before)}")
        check_run(chosen, before, weights(before, seed), bound=bound, seed=seed, may_refuse=may_refuse)

    with _quiet():
        suite()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the trace of every fake tensor, which pytest would show where a test fails."""
    logger = logging.getLogger("torch.__trace")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def check_run(
    pass_: GraphPass,
    before: GraphModule,
    weights: WeightSource,
    *,
    bound: float | None = None,
    seed: int = 0,
    may_refuse: bool = False,
) -> PassResult:
    """Run `pass_` once, on `before`, and check `PROPERTIES`. The parameters are those of `check_pass`."""
    was = Snapshot.of(before)
    try:
        result = pass_(before)
    except Exception as error:
        assume(not (may_refuse and is_for_the_user(error)))
        raise
    trial = Trial(pass_, before, was, result, weights, bound, seed)
    for name, check in PROPERTIES.items():
        for fault in check(trial):
            raise PropertyError(name, pass_, fault)
    return result


def _check_usage(pass_: Any, graphs: Any, weights: Any, bound: float | None) -> None:
    if graphs is None and _is_function(pass_):
        raise TypeError("a function that gives passes needs graphs=…, a strategy of the graphs it is called with")
    rounds = getattr(pass_, "effect", None) is Effect.ROUNDS
    if rounds and bound is None and weights is random_weights:
        raise TypeError("a pass that rounds needs weights=… that need no rounding, or a bound=… on the relative error")


def _is_function(pass_: Any) -> bool:
    return not isinstance(pass_, st.SearchStrategy) and not hasattr(pass_, "requires")


def _draw(data: st.DataObject, pass_: Any, graphs: Any) -> tuple[GraphPass, GraphModule]:
    if _is_function(pass_):
        graph_module = data.draw(graphs)
        return data.draw(pass_(graph_module), label="pass"), graph_module
    chosen = data.draw(pass_, label="pass") if isinstance(pass_, st.SearchStrategy) else pass_
    return chosen, data.draw(_graphs_for(chosen) if graphs is None else graphs)


def _graphs_for(pass_: GraphPass) -> st.SearchStrategy[GraphModule]:
    """Graphs of the stages that `pass_` takes, those of the earliest most often."""
    last = max(Stage) if pass_.ensures is None else pass_.ensures
    later = [stage for stage in Stage if pass_.requires < stage <= last]
    return st.sampled_from([*[pass_.requires] * 3, *later]).flatmap(graphs_of)
