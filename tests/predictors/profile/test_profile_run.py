"""A profile says what transformers' own model computes; whatever ends it, the same command goes on to equal bytes."""

import functools
import hashlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.digests import digests
from helpers.families import build, save
from helpers.support import BuildOnce, save_byte_tokenizer, save_tiny_llama
from picompile.errors import UsageError
from picompile.output import reserve
from picompile.predictors.firing import MEASURES, FiringRule
from picompile.predictors.profile import files, thresholds
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import Profile, load_profile
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.windows import held_out_windows
from picompile.progress import NoProgress

WINDOW = 64

Seen = dict[str, list[Tensor]]


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


def saved_with_tokenizer(name: str, folder: Path) -> None:
    model = build(name)
    save(name, model, folder)
    save_byte_tokenizer(folder, model.config.vocab_size)


def assert_all_counted(model: nn.Module, profile: Profile) -> None:
    """Compare all layers with what goes through the eager model: inputs of down, and of the norm before the block."""
    is_opt = hasattr(model.model, "decoder")
    layers = model.model.decoder.layers if is_opt else model.model.layers
    downs = [layer.fc2 if is_opt else layer.mlp.down_proj for layer in layers]
    modules = {f"down{i}": down for i, down in enumerate(downs)}
    norms = [layer.self_attn_layer_norm if is_opt else layer.post_attention_layernorm for layer in layers]
    modules |= {f"norm{i}": norm for i, norm in enumerate(norms)}
    seen = recorded(model, profile.calibration(), modules)
    for i, down in enumerate(downs):
        assert_counted(profile, i, torch.cat(seen[f"down{i}"]), down, torch.cat(seen[f"norm{i}"]))


@pytest.mark.slow("captures a model per family; another is fast", but=("opt-post-norm",))
@pytest.mark.parametrize("name", ["bitnet", "opt-post-norm"])
def test_counts_and_samples_of_other_blocks(name: str, build_once: BuildOnce, prose: Path, tmp_path: Path) -> None:
    """bitnet's input of down is normalized and weighted already; neurons fire by what they are before."""
    folder = build_once(f"{name}-with-tokenizer", functools.partial(saved_with_tokenizer, name))
    profile = profiled(folder, tmp_path / "profile", prose, tokens=1024, samples=5000)
    assert_all_counted(build(name), profile)
    assert torch.equal(profile.positions(1), torch.arange(1024))


def test_counts_and_samples_of_a_relu_model(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    profile = profiled(tiny_model, tmp_path / "new" / "profile", prose, tokens=1100, samples=333)
    assert_all_counted(eager(tiny_model), profile)
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


@pytest.mark.parametrize("by", MEASURES)
def test_silu_gets_thresholds_within_the_accuracy_bound(
    build_once: BuildOnce, prose: Path, tmp_path: Path, by: str
) -> None:
    folder = build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))
    profile = profiled(folder, tmp_path / "profile", prose, tokens=1024, accuracy_bound=0.01, by=by)
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


@pytest.mark.slow("searches twice per bound; one is fast", but=("5.0",))
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
    options = ProfileOptions(
        (prose,), window=16, tokens=1024, accuracy_bound=gate, held_out=(prose,), held_out_tokens=640
    )
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


@pytest.mark.slow("profiles a model twice")
def test_contribution_silences_more_than_magnitude(uneven: Path, prose: Path, tmp_path: Path) -> None:
    profiles = {by: profiled(uneven, tmp_path / by, prose, tokens=1024, accuracy_bound=0.001, by=by) for by in MEASURES}
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
    assert [profile.thresholds for profile in profiles.values()] == [None, None]
    with pytest.raises(UsageError, match="profile of other inputs"):
        profiled(tiny_model, tmp_path / "magnitude", prose, tokens=1024, by="contribution")


def test_text_of_the_library_and_of_the_model_itself(
    tiny_model: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.predictors.profile.prepare._LEAST_TOKENS", 64)
    # It was compiled before, with a context of one window.
    monkeypatch.setattr(
        "picompile.predictors.profile.prepare.compile_lossless",
        lambda _, output, **more: shutil.copytree(tiny_artifact, output),
    )
    said = Mock(wraps=NoProgress())
    options = ProfileOptions(tokens=2048, samples=16, window=WINDOW, held_out_tokens=200)
    profile = profile_model(tiny_model, tmp_path / "profile", options, said)
    line = said.say.call_args.args[0]
    assert "no calibration text is given" in line and "102 tokens of the model's own" in line
    assert profile.tokens == 2048 and profile.held_out_tokens == 192
    assert "standard library" in profile.sources[0] and "held-out" in profile.held_out_source
    assert profile.sources[1] == "64 tokens of the model's own"
    *_, own = profile.calibration()
    assert own[0] == 256  # the token that begins a text
    (measured,), source = held_out_windows(tiny_model, (), 200)
    assert measured[:192] == [token for window in profile.held_out() for token in window]
    assert source == profile.held_out_source


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(params=["relu", "silu"])
def model(request: pytest.FixtureRequest, build_once: BuildOnce, tiny_model: Path) -> Path:
    if request.param == "relu":
        return tiny_model
    return build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))


def options(prose: Path, **more: object) -> ProfileOptions:
    return ProfileOptions((prose,), tokens=1024, samples=100, window=128, accuracy_bound=0.01, **more)  # type: ignore[arg-type]


@pytest.mark.slow("ends and resumes a profiling again and again")
def test_ended_between_any_two_files(model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two bisections instead of six.
    monkeypatch.setattr("picompile.predictors.profile.thresholds._STEPS", 4)
    profile_model(model, tmp_path / "undisturbed", options(prose))
    expected = digests(tmp_path / "undisturbed")
    assert set(expected) == {"profile.json", "tokens.safetensors", *(f"layers/00{i}.safetensors" for i in (0, 1))}
    written, whole_runs, folder = 0, 0, tmp_path / "ended"
    real_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        nonlocal written
        written += 1
        if written == random_end:
            if before:
                # As a process leaves it that had no time to remove it.
                (path.parent / ".stray.tmp").write_bytes(b"half")
                raise Ended
            real_rename(path, target)
            raise Ended
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    for end in range(1, 60):
        written, random_end, before = 0, end, end % 2 == 0
        folder = tmp_path / f"ended{end}"
        try:
            profile_model(model, folder, options(prose))
            whole_runs += 1
        except Ended:
            random_end = -1
            profile_model(model, folder, options(prose))
        assert digests(folder) == expected
        if whole_runs:
            break
    # The description twice, the tokens, two layers, what is alive at three cuts; for the search it is more.
    assert end > (6 if model.name == "tiny-model" else 16)


@pytest.mark.parametrize("damage", ["{", "{}", None])
def test_notes_that_cannot_be_read_are_made_again(
    damage: str | None, build_once: BuildOnce, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes hold the values alive between segments, and what the search has found."""
    monkeypatch.setattr("picompile.predictors.profile.thresholds._STEPS", 4)
    model = build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))
    # Every worker has a text of its own.
    name = f"tiny-silu-profile-{hashlib.sha256(prose.read_bytes()).hexdigest()}"
    expected = build_once(name, lambda folder: profile_model(model, folder, options(prose)) and None)
    real = files.write_tensors

    def write(path: Path, *arguments: Any) -> None:
        real(path, *arguments)
        if path.name == "state.safetensors" and (path.parent / "layers" / "000.safetensors").exists():
            raise Ended

    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.state.write_tensors", write)
        profile_model(model, tmp_path / "profile", options(prose))
    state = tmp_path / "profile" / "state.safetensors"
    if damage is None:
        tensors, metadata = files.read_tensors(state)
        real(state, dict(list(tensors.items())[:-1]), metadata)
    else:
        state.write_bytes(state.read_bytes()[:-1])
        (tmp_path / "profile" / "search.json").write_text(damage)
    profile_model(model, tmp_path / "profile", options(prose))
    assert digests(tmp_path / "profile") == digests(expected)


def test_work_of_other_inputs_begins_anew(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profile"
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, folder, options(prose, seed=1))
    assert (folder / "layers" / "001.safetensors").exists()
    said = Mock(wraps=NoProgress())
    profile_model(tiny_model, folder, options(prose, seed=2), said)
    said.say.assert_called_once_with(f"{folder}: was begun with other inputs, and begins anew")
    profile_model(tiny_model, tmp_path / "undisturbed", options(prose, seed=2))
    assert digests(folder) == digests(tmp_path / "undisturbed")


def test_two_at_once(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    held = reserve(tmp_path / "profile", overwrite=True)
    with held, pytest.raises(UsageError, match=rf"is being written by another picompile \(process {os.getpid()}\)"):
        profile_model(tiny_model, tmp_path / "profile", options(prose))


def test_a_complete_profile_stays_until_another_takes_its_place(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "profile", options(prose, seed=2, overwrite=True)
    profile_model(tiny_model, folder, options(prose, seed=1))
    (folder / "notes.txt").write_text("mine")
    before, said = digests(folder), Mock(wraps=NoProgress())
    profile_model(tiny_model, folder, options(prose, seed=1), said)
    said.say.assert_called_once_with(f"{folder}: is complete already")
    with pytest.raises(UsageError, match="profile of other inputs; give --overwrite"):
        profile_model(tiny_model, folder, options(prose, seed=2))
    assert digests(folder) == before
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, folder, other)
    assert {name: digest for name, digest in digests(folder).items() if not name.startswith(".")} == before
    assert load_profile(folder).tokens
    said = Mock(wraps=NoProgress())
    profile_model(tiny_model, folder, other, said)
    said.say.assert_called_once_with(f"{folder}: was begun, and goes on")
    profile_model(tiny_model, tmp_path / "undisturbed", options(prose, seed=2))
    mine = {"notes.txt": before["notes.txt"]}
    assert digests(folder) == digests(tmp_path / "undisturbed") | mine
    # What another that was interrupted has left is removed by the first that is asked for.
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, folder, options(prose, seed=1, overwrite=True))
    profile_model(tiny_model, folder, options(prose, seed=2))
    assert digests(folder) == digests(tmp_path / "undisturbed") | mine
    assert {path.name for path in tmp_path.iterdir()} == {"profile", "undisturbed"}
