"""Routers of experts against the operator in eager PyTorch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Array, Workbench
from helpers.products import sampled
from picompile_codegen.specs import RouteSpec
from picompile_passes.dialect import OPERATORS
from picompile_passes.dialect.route import GROUP_SCORES, NORMALIZED, SCORES

ROWS = 7
# Experts, how many are chosen, groups and how many of those.
SIZES = (
    *((2, 1, 1, 1), (5, 5, 1, 1), (8, 2, 1, 1), (77, 6, 1, 1), (128, 8, 1, 1), (512, 22, 1, 1)),
    *((12, 3, 4, 2), (60, 4, 10, 3), (256, 8, 8, 4), (6, 2, 6, 3)),
)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("route") / "host.so")


def eager(spec: RouteSpec, inputs: dict[str, Array]) -> Array:
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    route: Any = OPERATORS["route"].target
    gains: torch.Tensor = route(
        tensors["logits"],
        tensors.get("bias"),
        tensors.get("expert_scale"),
        spec.chosen,
        spec.scores,
        spec.normalized,
        spec.scale,
        spec.eps,
        spec.groups,
        spec.chosen_groups,
        spec.group_score,
    )
    return gains.numpy()


def inputs_of(spec: RouteSpec, tokens: int, seed: int) -> dict[str, Array]:
    """Numbers that lie far enough apart: which is higher does not depend on rounding."""
    rng = np.random.default_rng(seed)
    logits = np.stack([rng.permutation(spec.experts) for _ in range(tokens)]) / spec.experts * 8 - 4
    inputs = {"logits": logits.astype(np.float32)}
    if spec.bias:
        inputs["bias"] = rng.uniform(-0.5, 0.5, spec.experts).astype(np.float32)
    if spec.expert_scale:
        inputs["expert_scale"] = rng.uniform(0.5, 2, spec.experts).astype(np.float32)
    return inputs


def assert_equal(found: Array, expected: Array) -> None:
    assert np.array_equal(found != 0, expected != 0), "other experts are chosen"
    # A logit of 0 over itself is no number.
    assert np.allclose(found, expected, rtol=2e-6, atol=1e-12, equal_nan=True)


def is_case(size: tuple[int, int, int, int], normalized: str, group_score: str, given: str, **_: object) -> bool:
    experts, _, groups, _ = size
    if normalized == "sparse_mixer" and (groups > 1 or "b" in given):
        return False
    return group_score == "max" or 1 < groups < experts


@sampled(
    slow="compiles a kernel per case",
    size=SIZES,
    scores=tuple(SCORES),
    normalized=NORMALIZED,
    group_score=GROUP_SCORES,
    given=("", "b", "s", "bs"),
    rows=(1, ROWS),
    when=is_case,
)
def test_route(
    workbench: Workbench,
    size: tuple[int, int, int, int],
    scores: str,
    normalized: str,
    group_score: str,
    given: str,
    rows: int,
) -> None:
    experts, chosen, groups, chosen_groups = size
    spec = RouteSpec(
        experts=experts,
        rows=rows,
        chosen=chosen,
        scores=scores,
        normalized=normalized,
        scale=2.5 if given else 1.0,
        eps=1e-3 if given else 0.0,
        groups=groups,
        chosen_groups=chosen_groups,
        group_score=group_score,
        bias="b" in given,
        expert_scale="s" in given,
    )
    for tokens in sorted({1, rows - 2, rows} - {-1}):
        inputs = inputs_of(spec, tokens, seed=tokens)
        found = workbench.same(spec, inputs, tokens=tokens)["gains"]
        assert_equal(found[:tokens], eager(spec, inputs))
        assert np.isnan(found[tokens:]).all()
        for t in range(tokens):
            row = inputs | {"logits": inputs["logits"][t : t + 1]}
            alone = workbench.run(replace(spec, rows=1), row)["gains"]
            assert alone.tobytes() == found[t : t + 1].tobytes(), "a token depends on the others"


@pytest.mark.parametrize("scores", SCORES)
def test_of_equal_experts_the_first_is_chosen(workbench: Workbench, scores: str) -> None:
    spec = RouteSpec(experts=21, rows=ROWS, chosen=4, scores=scores, normalized="none")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        inputs = {"logits": rng.integers(-1, 2, (ROWS, 21)).astype(np.float32)}
        inputs["logits"][0] = -0.0
        assert_equal(workbench.run(spec, inputs, tokens=ROWS)["gains"], eager(spec, inputs))


@pytest.mark.parametrize("group_score", GROUP_SCORES)
def test_of_equal_groups_the_first_is_chosen(workbench: Workbench, group_score: str) -> None:
    size = {"experts": 24, "groups": 8, "chosen_groups": 3}
    spec = RouteSpec(
        rows=ROWS, chosen=5, scores="sigmoid", normalized="sum", group_score=group_score, bias=True, **size
    )
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits, bias = rng.integers(-1, 2, (ROWS, 24)), rng.integers(-1, 2, 24)
        # An expert may be below all of the groups that are dropped.
        inputs = {"logits": logits.astype(np.float32), "bias": np.where(bias < 0, -np.inf, bias).astype(np.float32)}
        assert_equal(workbench.run(spec, inputs, tokens=ROWS)["gains"], eager(spec, inputs))


@sampled(eps=(0.0, 0.02, 0.5), sizes=((16, 2), (21, 5), (3, 3)), slow="compiles a kernel per case")
def test_experts_that_are_drawn_one_after_the_other(workbench: Workbench, eps: float, sizes: tuple[int, int]) -> None:
    """Equal logits, whose weights are halves, zeros and negative ones among them."""
    experts, chosen = sizes
    spec = RouteSpec(
        experts=experts, rows=ROWS, chosen=chosen, scores="identity", normalized="sparse_mixer", eps=eps, scale=1.5
    )
    for seed in range(10):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, 2, (ROWS, experts)) + rng.uniform(-6, 6, (ROWS, 1))
        logits[1] = rng.integers(-1, 2, experts)
        logits[2] = -abs(logits[2])
        logits[3] = 0
        logits[4, rng.integers(experts)] = np.nan
        inputs = {"logits": logits.astype(np.float32)}
        found, expected = workbench.run(spec, inputs, tokens=ROWS)["gains"], eager(spec, inputs)
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        assert np.isnan(found[4]).sum() == 1
        assert_equal(np.nan_to_num(found), np.nan_to_num(expected))


def small(scores: str, normalized: str) -> RouteSpec:
    return RouteSpec(experts=9, rows=1, chosen=3, scores=scores, normalized=normalized)


@sampled(scores=tuple(SCORES), normalized=NORMALIZED, slow="compiles a kernel per case")
def test_large_logits(workbench: Workbench, scores: str, normalized: str) -> None:
    """Exponentials neither overflow nor vanish."""
    spec = small(scores, normalized)
    for shift in (-60, 0, 80):
        inputs = {"logits": np.array([[1, 7, 3, 2, 5, 6, 8, 4, 9]], np.float32) * 1.5 + shift}
        if scores == "sigmoid" and shift == 80:
            continue  # all are 1 there
        found, expected = workbench.run(spec, inputs)["gains"], eager(spec, inputs)
        assert_equal(found, expected)


@sampled(scores=tuple(SCORES), groups=(1, 4), slow="compiles a kernel per case")
def test_what_is_not_a_number_shows(workbench: Workbench, scores: str, groups: int) -> None:
    """It is chosen before all numbers; other tokens have what they have without."""
    spec = RouteSpec(
        experts=12, rows=ROWS, chosen=3, scores=scores, normalized="none", groups=groups, chosen_groups=-(-groups // 2)
    )
    inputs = inputs_of(spec, ROWS, seed=5)
    before = workbench.run(spec, inputs, tokens=ROWS)["gains"]
    inputs["logits"][2, 7], inputs["logits"][3] = np.nan, -np.nan
    inputs["logits"][4, 3:5] = np.inf, -np.inf
    found = workbench.run(spec, inputs, tokens=ROWS)["gains"]
    assert np.isnan(found[2:4]).any(axis=1).all()
    assert np.array_equal(np.isnan(found[2:4]), np.isnan(eager(spec, inputs)[2:4]))
    others = [0, 1, 5, 6]
    assert np.array_equal(found[others], before[others])
    assert np.count_nonzero(found[4]) <= 3
