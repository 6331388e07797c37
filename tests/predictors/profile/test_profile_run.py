"""A profile says what transformers' own model computes."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.families import build, save
from helpers.support import BuildOnce, save_byte_tokenizer, save_tiny_llama
from picompile.errors import UsageError
from picompile.predictors.firing import MEASURES, FiringRule
from picompile.predictors.profile import (
    Profile,
    ProfileOptions,
    held_out_windows,
    load_profile,
    profile_model,
    thresholds,
)
from picompile.predictors.profile.text import CalibrationText
from picompile.progress import NoProgress

WINDOW = 64

Seen = dict[str, list[Tensor]]


class Said(NoProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def profiled(model: Path, output: Path, text: Path, **options: Any) -> Profile:
    return profile_model(model, output, ProfileOptions((text,), window=WINDOW, **options))


def eager(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def recorded(model: nn.Module, windows: list[list[int]], modules: dict[str, nn.Module]) -> Seen:
    """Return the inputs of each of `modules`, and the mean loss under "loss"."""
    seen: Seen = {name: [] for name in (*modules, "loss")}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: seen[name].append(inputs[0].reshape(-1, inputs[0].shape[-1]))

    hooks = [module.register_forward_pre_hook(record(name)) for name, module in modules.items()]
    with torch.no_grad():
        for ids in windows:
            logits = model(torch.tensor([ids])).logits[0].double()
            seen["loss"].append(nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none"))
    for hook in hooks:
        hook.remove()
    return seen


def measured(hidden: Tensor, down: nn.Linear, by: str) -> Tensor:
    """Return what is compared with a threshold, from the input of `down`."""
    return hidden.abs() * down.weight.detach().norm(dim=0) if by == "contribution" else hidden.abs()


def assert_counted(profile: Profile, layer: int, hidden: Tensor, down: nn.Linear, read: Tensor) -> None:
    """`hidden` [tokens, neurons] went to `down`; `read` [tokens, hidden] is what the samples are of."""
    threshold, compared = profile.layers[layer].threshold, measured(hidden, down, profile.by)
    fires = compared > threshold
    # Values next to the threshold may fall to either side.
    unsure = ((compared - threshold).abs() < 1e-6).sum(0) if threshold else torch.zeros(hidden.shape[1])
    assert ((profile.counts(layer) - fires.sum(0)).abs() <= unsure + 1).all()
    assert (profile.counts(layer) - fires.sum(0)).abs().sum() <= unsure.sum() + 2
    expected = (hidden.abs() * fires).sum(0) * down.weight.norm(dim=0)
    torch.testing.assert_close(profile.contribution(layer), expected, rtol=1e-4, atol=1e-3)
    positions = profile.positions(layer)
    torch.testing.assert_close(profile.samples(layer).float(), read[positions], rtol=1e-3, atol=2e-4)


def test_contributions_behind_a_norm_across_neurons(prose: Path, tmp_path: Path) -> None:
    """The eager model's input of down is normalized and weighted already; neurons fire by what they are before."""
    model = build("bitnet")
    save("bitnet", model, tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model", model.config.vocab_size)
    profile = profiled(tmp_path / "model", tmp_path / "profile", prose, tokens=1100, samples=50)
    layers = model.model.layers
    modules = {f"down{i}": layer.mlp.down_proj for i, layer in enumerate(layers)}
    modules |= {f"norm{i}": layer.post_attention_layernorm for i, layer in enumerate(layers)}
    seen = recorded(model, profile.calibration(), modules)
    for i, layer in enumerate(layers):
        assert_counted(profile, i, torch.cat(seen[f"down{i}"]), layer.mlp.down_proj, torch.cat(seen[f"norm{i}"]))


def test_counts_and_samples_of_a_relu_model(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    profile = profiled(tiny_model, tmp_path / "new" / "profile", prose, tokens=1100, samples=333)
    model = eager(tiny_model)
    layers = model.model.layers
    modules = {f"down{i}": layer.mlp.down_proj for i, layer in enumerate(layers)}
    modules |= {f"norm{i}": layer.post_attention_layernorm for i, layer in enumerate(layers)}
    seen = recorded(model, profile.calibration(), modules)
    for i, layer in enumerate(layers):
        assert_counted(profile, i, torch.cat(seen[f"down{i}"]), layer.mlp.down_proj, torch.cat(seen[f"norm{i}"]))
    assert profile.tokens == 17 * WINDOW == sum(map(len, profile.calibration()))
    assert profile.sample_count == 333 == len(profile.positions(0).unique())
    assert torch.equal(profile.positions(0), profile.positions(1))
    assert [(row.layer, row.neurons, row.threshold, row.place) for row in profile.layers] == [
        (0, 200, 0.0, "stream"),
        (1, 200, 0.0, "stream"),
    ]
    counts = profile.counts(1)
    row = profile.layers[1]
    assert row.firing_share == pytest.approx(float(counts.sum()) / 200 / profile.tokens)
    assert row.never_fired == int((counts == 0).sum())
    best = counts.sort(descending=True).values[: round(row.neurons_for_80_percent * 200)].double()
    assert best[:-1].sum() < 0.8 * counts.sum() <= best.sum()
    assert profile.thresholds is None


def test_post_norm_with_biases(build_once: BuildOnce, prose: Path, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        save("opt-post-norm", build("opt-post-norm"), folder)
        save_byte_tokenizer(folder, vocabulary=503)

    folder = build_once("opt-post-norm-with-tokenizer", make)
    profile = profiled(folder, tmp_path / "profile", prose, tokens=1024, samples=5000)
    model = eager(folder)
    layers = model.model.decoder.layers
    modules = {f"down{i}": layer.fc2 for i, layer in enumerate(layers)}
    modules |= {f"norm{i}": layer.self_attn_layer_norm for i, layer in enumerate(layers)}
    seen = recorded(model, profile.calibration(), modules)
    for i, layer in enumerate(layers):
        assert_counted(profile, i, torch.cat(seen[f"down{i}"]), layer.fc2, torch.cat(seen[f"norm{i}"]))
    assert torch.equal(profile.positions(1), torch.arange(1024))


@pytest.mark.parametrize("by", MEASURES)
def test_silu_gets_thresholds_within_the_accuracy_bound(
    build_once: BuildOnce, prose: Path, tmp_path: Path, by: str
) -> None:
    folder = build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))
    profile = profiled(folder, tmp_path / "profile", prose, tokens=1024, gate=0.01, by=by)
    found = profile.thresholds
    assert found is not None and found["by"] == profile.by == by
    assert profile.firing_rules == {row.layer: FiringRule(row.threshold, by) for row in profile.layers}
    model = eager(folder)
    layers = model.model.layers
    dense = recorded(model, profile.held_out(), {f"down{i}": layer.mlp.down_proj for i, layer in enumerate(layers)})
    assert found["dense_perplexity"] == pytest.approx(math.exp(torch.cat(dense["loss"]).mean()), rel=1e-5)
    # As much of each layer is silenced, to the width of a bin.
    for i, row in enumerate(profile.layers):
        compared = measured(torch.cat(dense[f"down{i}"]), layers[i].mlp.down_proj, by)
        silenced = float((compared <= row.threshold).double().mean())
        assert found["silenced_share"] - 0.04 < silenced <= found["silenced_share"] + 1e-3
        assert row.threshold > 0

    def silence(threshold: float) -> Callable[[nn.Linear, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        return lambda down, inputs: (torch.where(measured(inputs[0], down, by) > threshold, inputs[0], 0.0),)

    modules = {f"norm{i}": layer.post_attention_layernorm for i, layer in enumerate(layers)}
    modules |= {f"down{i}": layer.mlp.down_proj for i, layer in enumerate(layers)}
    hidden = recorded(model, profile.calibration(), {"down0": layers[0].mlp.down_proj})
    for layer, row in zip(layers, profile.layers, strict=True):
        layer.mlp.down_proj.register_forward_pre_hook(silence(row.threshold))
    losses = recorded(model, profile.held_out(), {})["loss"]
    assert found["perplexity"] == pytest.approx(math.exp(torch.cat(losses).mean()), rel=1e-4)
    assert found["perplexity"] <= found["dense_perplexity"] * 1.01
    # The samples of later layers are those of the model that leaves silent neurons out.
    assert_counted(profile, 0, torch.cat(hidden["down0"]), layers[0].mlp.down_proj, _reads(model, profile, modules, 0))
    torch.testing.assert_close(
        profile.samples(1).float(), _reads(model, profile, modules, 1)[profile.positions(1)], rtol=1e-3, atol=2e-3
    )


@pytest.mark.parametrize("gate", [0.01, 5.0])
def test_a_search_reads_as_much_as_makes_it_clear(
    build_once: BuildOnce, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: float
) -> None:
    """It finds what a search finds that always reads everything."""
    folder = build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))
    read: list[int] = []
    losses = thresholds.ThresholdSearch._losses

    def counted(search: thresholds.ThresholdSearch, rules: Any, step: int, part: range) -> list[float]:
        read.append(len(part))
        return losses(search, rules, step, part)

    monkeypatch.setattr(thresholds.ThresholdSearch, "_losses", counted)
    options = ProfileOptions((prose,), window=16, tokens=1024, gate=gate, held_out=(prose,), held_out_tokens=640)
    some = profile_model(folder, tmp_path / "some", options)
    windows, parts = len(some.held_out()), sum(read)
    read.clear()
    monkeypatch.setattr(thresholds, "_CLEAR", math.inf)
    every = profile_model(folder, tmp_path / "every", options)
    assert sum(read) == 6 * windows >= parts
    assert gate < 1 or parts < 3 * windows
    found, whole = some.thresholds, every.thresholds
    assert found is not None and whole is not None
    assert {name: found[name] for name in found if name != "tried"} == {n: whole[n] for n in whole if n != "tried"}
    assert found["change"]["low"] < found["change"]["value"] < found["change"]["high"]
    assert found["tried"].keys() == whole["tried"].keys()


def _reads(model: nn.Module, profile: Profile, modules: dict[str, nn.Module], layer: int) -> Tensor:
    name = f"norm{layer}"
    return torch.cat(recorded(model, profile.calibration(), {name: modules[name]})[name])


@pytest.fixture
def uneven(build_once: BuildOnce) -> Path:
    """A SiLU model in which half of the rows of down are a hundredth as long as the others."""

    def make(folder: Path) -> None:
        save_tiny_llama(folder, hidden_act="silu", num_hidden_layers=1)
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.layers.0.mlp.down_proj.weight"][:, ::2] *= 0.01
        save_file(weights, file, {"format": "pt"})

    return build_once("tiny-silu-uneven", make)


def test_contribution_silences_more_than_magnitude(uneven: Path, prose: Path, tmp_path: Path) -> None:
    profiles = {by: profiled(uneven, tmp_path / by, prose, tokens=1024, gate=0.001, by=by) for by in MEASURES}
    shares = {by: (profile.thresholds or {})["silenced_share"] for by, profile in profiles.items()}
    assert shares["contribution"] > max(0.45, shares["magnitude"] + 0.1)
    for by, profile in profiles.items():
        assert load_profile(profile.folder) == profile
        assert profile.layers[0].firing_share == pytest.approx(1 - shares[by], abs=0.06)
    # The long rows fire more often, and the short ones hardly ever.
    long, short = (profiles["contribution"].counts(0)[start::2].double().mean() / 1024 for start in (1, 0))
    assert short < 0.1 * long


def test_a_measure_changes_nothing_where_neurons_can_be_silent(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    profiles = {by: profiled(tiny_model, tmp_path / by, prose, tokens=1024, by=by) for by in MEASURES}
    files = {by: sorted((tmp_path / by / "layers").iterdir()) for by in MEASURES}
    assert [file.read_bytes() for file in files["magnitude"]] == [file.read_bytes() for file in files["contribution"]]
    assert profiles["magnitude"].layers == profiles["contribution"].layers
    assert [profile.by for profile in profiles.values()] == ["magnitude", "magnitude"]
    with pytest.raises(UsageError, match="profile of other inputs"):
        profiled(tiny_model, tmp_path / "magnitude", prose, tokens=1024, by="contribution")


def test_without_an_accuracy_bound_there_are_no_thresholds(build_once: BuildOnce, prose: Path, tmp_path: Path) -> None:
    folder = build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))
    profile = profiled(folder, tmp_path / "profile", prose, tokens=1024, gate=None)
    assert profile.thresholds is None
    assert [row.threshold for row in profile.layers] == [0.0, 0.0]
    assert all(row.firing_share > 0.99 for row in profile.layers)


def test_a_complete_profile_is_read_and_only_force_replaces_one_of_other_inputs(
    tiny_model: Path, prose: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    options = ProfileOptions((prose,), tokens=1024, samples=50, window=WINDOW)
    first = profile_model(tiny_model, folder, options)
    before = (folder / "layers" / "000.safetensors").stat().st_mtime_ns
    said = Said()
    assert profile_model(tiny_model, folder, options, said) == first
    assert said.lines == [f"{folder}: is complete already"]
    assert (folder / "layers" / "000.safetensors").stat().st_mtime_ns == before
    (folder / "mine.txt").write_text("kept")
    other = ProfileOptions((prose,), tokens=1024, samples=51, window=WINDOW)
    with pytest.raises(UsageError, match="profile of other inputs; give --force"):
        profile_model(tiny_model, folder, other)
    assert load_profile(folder) == first
    forced = ProfileOptions((prose,), tokens=1024, samples=51, window=WINDOW, overwrite=True)
    assert profile_model(tiny_model, folder, forced).sample_count == 51
    assert (folder / "mine.txt").read_text() == "kept"


def test_text_of_the_library_and_of_the_model_itself(
    tiny_model: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.predictors.profile.prepare._LEAST_TOKENS", 64)
    # It was compiled before, with a context of one window.
    monkeypatch.setattr(
        "picompile.steps.compile_lossless", lambda _, output, *more: shutil.copytree(tiny_artifact, output)
    )
    said = Said()
    options = ProfileOptions(tokens=2048, samples=16, window=WINDOW, held_out_tokens=200)
    profile = profile_model(tiny_model, tmp_path / "profile", options, said)
    (line,) = said.lines
    assert "no calibration text is given" in line and "102 tokens of the model's own" in line
    assert profile.tokens == 2048 and profile.held_out_tokens == 192
    assert "standard library" in profile.sources[0] and "held-out" in profile.held_out_source
    assert profile.sources[1] == "64 tokens of the model's own"
    *_, own = profile.calibration()
    assert own[0] == 256  # the token that begins a text
    (measured,), source = held_out_windows(tiny_model, (), 200)
    assert measured[:192] == [token for window in profile.held_out() for token in window]
    assert source == profile.held_out_source


def test_held_out_text_of_its_own(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    held_out = CalibrationText("other words", "0123456789" * 30)
    profile = profiled(tiny_model, tmp_path / "profile", prose, held_out=(held_out,), samples=7)
    assert profile.held_out_source == "other words"
    assert profile.held_out_tokens == 4 * WINDOW
    assert profile.tokens == 3001 // WINDOW * WINDOW
    windows, source = held_out_windows(tiny_model, (held_out,), 128)
    assert source == "other words"
    assert windows == [profile.held_out()[0] + profile.held_out()[1]]
