"""A profile of a mixture: how often tokens choose each expert, and on which of them its neurons fire."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from helpers.mixtures import RELU_MIXTURE, captured_mixture, save_tiny_mixture
from helpers.support import BuildOnce
from picompile.errors import UsageError
from picompile.placement.firing import firing_of_profile
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.collect import LayerCollector, summarize_experts
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import PROFILE_FILE, Profile, load_profile
from picompile.predictors.profile.run import profile_model
from picompile.report.numbers import Table
from picompile.report.profile import profile_section, read_profile
from picompile.streaming import Segment
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import FFN
from picompile_passes.passes.canonicalize import canonicalize

EXPERTS, CHOSEN, SIZE = 6, 2, 48


@pytest.fixture(scope="module")
def model(build_once: BuildOnce) -> Path:
    return build_once("tiny-mixture", save_tiny_mixture)


@pytest.fixture(scope="module")
def profile(model: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("mixture") / "profile"
    return profile_model(model, folder, ProfileOptions((prose,), window=64, tokens=4096))


def counted(model: Path, windows: list[list[int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layer the tokens that chose each expert, those on which each neuron fired, and its contribution."""
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    blocks = [layer.mlp for layer in eager.model.layers]
    inputs: list[list[Tensor]] = [[] for _ in blocks]
    for seen, block in zip(inputs, blocks, strict=True):
        block.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].reshape(-1, 64)))
    with torch.no_grad():
        for ids in windows:
            eager(torch.tensor([ids]))
        return [_of_layer(block, torch.cat(seen)) for block, seen in zip(blocks, inputs, strict=True)]


def _of_layer(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = (x @ block.gate.weight.T).softmax(-1)  # type: ignore[union-attr, operator]
    weights, experts = scores.topk(CHOSEN, dim=-1)
    chosen, fired, contribution = [], [], []
    for expert in range(EXPERTS):
        took = experts == expert
        tokens = x[took.any(-1)]
        gate_up, down = block.experts.gate_up_proj[expert], block.experts.down_proj[expert]  # type: ignore[union-attr, index]
        h = (tokens @ gate_up[:SIZE].T).relu() * (tokens @ gate_up[SIZE:].T)
        chosen.append(len(tokens))
        fired.append((h != 0).sum(0))
        contribution.append((h * weights[took].unsqueeze(-1)).abs().sum(0) * down.norm(dim=0))
    return torch.tensor(chosen), torch.cat(fired), torch.cat(contribution)


def test_choices_and_firings_are_those_of_transformers(model: Path, profile: Profile) -> None:
    expected = counted(model, profile.calibration())
    for layer, (chosen, fired, contribution) in zip(profile.layers, expected, strict=True):
        assert (layer.experts, layer.neurons) == (EXPERTS, EXPERTS * SIZE)
        assert int(profile.chosen(layer.layer).sum()) == CHOSEN * profile.tokens
        # A rounding may turn a close call.
        assert int((profile.chosen(layer.layer) - chosen).abs().sum()) <= 4
        assert float((profile.counts(layer.layer) - fired).abs().sum()) < 1e-3 * float(fired.sum())
        torch.testing.assert_close(profile.contribution(layer.layer), contribution, rtol=2e-2, atol=1e-3)
        most = profile.counts(layer.layer).view(EXPERTS, -1).max(-1).values
        assert bool((most <= profile.chosen(layer.layer)).all())
        assert layer.firing_share < CHOSEN / EXPERTS
        assert layer.never_chosen == int((profile.chosen(layer.layer) == 0).sum())


@pytest.mark.parametrize("sequences", [1, 5])
def test_a_plan_reads_experts_as_often_as_they_were_chosen(profile: Profile, sequences: int) -> None:
    firing = firing_of_profile(profile, sequences)
    for layer, found in zip(profile.layers, firing.layers, strict=True):
        shares = profile.chosen(layer.layer).double() / profile.tokens
        assert found.chosen == pytest.approx(float((1 - (1 - shares) ** sequences).mean()))
        if sequences == 1:
            assert found.chosen == pytest.approx(CHOSEN / EXPERTS)
        assert float(found.shares.max()) <= 1
        assert float(found.shares.mean()) < found.chosen


def test_a_profile_is_read_back_and_checked(profile: Profile, tmp_path: Path) -> None:
    assert load_profile(profile.folder) == profile
    content = json.loads((profile.folder / PROFILE_FILE).read_text())
    assert all(layer["experts"] == EXPERTS for layer in content["layers"])
    content["layers"][0]["experts"] = 5
    damaged = tmp_path / "profile"
    damaged.mkdir()
    (damaged / PROFILE_FILE).write_text(json.dumps(content))
    with pytest.raises(UsageError, match="experts"):
        load_profile(damaged)


def test_gains_and_the_order_of_choices_are_kept(profile: Profile) -> None:
    for layer in profile.layers:
        gains, after = profile.gains(layer.layer), profile.chosen_after(layer.layer)
        assert gains.shape == (profile.sample_count, EXPERTS)
        assert ((gains != 0).sum(-1) == CHOSEN).all()
        # Every token but the last of a window is followed by one.
        windows = len(profile.calibration())
        assert int(after.sum()) == CHOSEN * CHOSEN * (profile.tokens - windows)
        assert (after.sum(0) <= CHOSEN * profile.chosen(layer.layer)).all()
        assert layer.chosen_again == int(after.diagonal().sum()) / (CHOSEN * profile.tokens)
        assert layer.chosen_again > 0


def test_choices_follow_those_of_the_token_before() -> None:
    """Three tokens of one window and two of another: no choice follows one of another window."""
    block = next(calls(canonicalize(captured_mixture(RELU_MIXTURE).graph_module).graph, FFN))
    collector = LayerCollector(cast(Segment, SimpleNamespace(nodes=())), block, FiringRule(), torch.arange(5))
    first = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    collector._count_choices(first)
    collector._count_choices(torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]], dtype=torch.bool))
    expected = torch.zeros(6, 6, dtype=torch.int64)
    pairs = "01 02 11 12 13 14 23 24 44 45 54 55"
    for before, then in (map(int, pair) for pair in pairs.split()):
        expected[before, then] += 1
    assert torch.equal(collector.after, expected)
    assert summarize_experts(collector.chosen, collector.after, 5)["chosen_again"] == 3 / 10


def test_reports_tell_how_often_experts_are_chosen(profile: Profile) -> None:
    section = profile_section("profile", read_profile(profile.folder))
    never = sum(layer.never_chosen for layer in profile.layers)
    assert ("experts", f"{EXPERTS * len(profile.layers)}, of which tokens never chose {never}") in section.facts
    (layers,) = [part for part in section.parts if isinstance(part, Table)]
    columns = ("experts", "make 80 % of choices", "never chosen", "chosen again")
    assert tuple(layers.columns)[-4:] == columns
    assert layers.rows[0][-4] == str(EXPERTS)
