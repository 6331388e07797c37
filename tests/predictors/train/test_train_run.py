"""Training of a whole model: the same bytes whatever the way, and what ends it."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest

from helpers.support import BUNDLED_MODEL, BuildOnce
from picompile import products
from picompile.errors import AccuracyError, UsageError
from picompile.predictors.files import load_predictors
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.profile import Profile, load_profile
from picompile.predictors.store import block_shapes
from picompile.predictors.train.choose import ChoiceLimits, Selection, tighten
from picompile.predictors.train.directory import TrainingDirectory
from picompile.predictors.train.options import TrainOptions
from picompile.predictors.train.run import _TrainingRun, train_predictors
from picompile.progress import NoProgress

OPTIONS = TrainOptions(accuracy_bound=None, budget=1.0, recall=0.9, exact=False, epochs=1, check_tokens=128, jobs=1)


@pytest.fixture
def profile(small_profile: Path) -> Profile:
    return load_profile(small_profile)


@pytest.fixture(scope="session")
def trained(build_once: BuildOnce, tiny_model: Path, small_profile: Path) -> Path:
    """Predictors of `tiny_model`. Tests must not change them."""

    def make(folder: Path) -> None:
        train_predictors(tiny_model, load_profile(small_profile), folder, OPTIONS)

    return build_once("trained", make)


def _bytes(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_layer_gets_a_predictor_that_reaches_its_target(trained: Path, tiny_model: Path) -> None:
    predictors = load_predictors(trained)
    assert [layer.layer for layer in predictors.layers] == [0, 1]
    for layer in predictors.layers:
        assert layer.kind == "learned"
        assert (layer.weighted_recall or 0) >= 0.9
        assert layer.parameters == (layer.rank or 0) * (96 + 200) + 200
        assert 0 < (layer.skewness or 0) <= 1
    facts = json.loads((trained / "predictors.json").read_text())
    assert facts["accuracy"]["bound"] is None
    assert facts["accuracy"]["tokens"] == 126
    assert not list((trained / "work").rglob("*.data"))


def test_the_recorded_perplexity_is_that_of_the_predicted_graph(
    trained: Path, tiny_model: Path, profile: Profile
) -> None:
    from picompile.frontend.hf import load_model
    from picompile.streaming import streamed_perplexity
    from picompile_passes.passes.canonicalize import canonicalize

    captured = load_model(tiny_model)
    graph = canonicalize(captured.graph_module)
    predictors = load_predictors(trained)
    predictors.require_model(profile.fingerprint, block_shapes(graph))
    predicted = predictors.insert_pass()(graph).graph_module
    windows = profile.held_out()[:2]
    # Training's library: another adds in another order, which moves scores over their thresholds, if rarely.
    with products.fast_products():
        perplexity = streamed_perplexity(predicted, predictors.weights(captured.weights), windows)
        dense = streamed_perplexity(graph, captured.weights, windows)
    assert perplexity == pytest.approx(predictors.accuracy["perplexity"])
    assert dense == pytest.approx(predictors.accuracy["dense_perplexity"])
    assert perplexity != predictors.accuracy["dense_perplexity"]


@pytest.mark.slow("trains in several processes")
def test_other_processes_give_the_same_bytes(trained: Path, tiny_model: Path, profile: Profile, tmp_path: Path) -> None:
    train_predictors(tiny_model, profile, tmp_path / "p", dataclasses.replace(OPTIONS, jobs=2))
    assert _bytes(tmp_path / "p") == _bytes(trained)


def test_interrupted_work_continues(trained: Path, tiny_model: Path, profile: Profile, tmp_path: Path) -> None:
    """As if killed between any two of the files that it writes."""
    whole = _bytes(trained)
    almost = [name for name in whole if name != "predictors.json"]
    for kept in ([], ["work/training.json"], ["work/training.json", "work/layers/001.safetensors"], almost):
        folder = tmp_path / f"p{len(kept)}"
        for name in kept:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(whole[name])
        if kept:
            (folder / "work" / "layers").mkdir(exist_ok=True)
            (folder / "work" / "layers" / ".000.safetensors.tmp").write_bytes(b"half")
            (folder / "work" / "layers" / "000.data").write_bytes(b"half")
        train_predictors(tiny_model, profile, folder, OPTIONS)
        assert _bytes(folder) == whole


def test_other_inputs_need_force_and_keep_the_candidates(
    trained: Path, tiny_model: Path, profile: Profile, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(trained, folder)
    other = dataclasses.replace(OPTIONS, exact=True, budget=0.01)
    with pytest.raises(UsageError, match="other inputs; give --overwrite"):
        train_predictors(tiny_model, profile, folder, other)
    assert _bytes(folder) == _bytes(trained)
    layer = (folder / "work" / "layers" / "000.safetensors").stat()
    predictors = train_predictors(tiny_model, profile, folder, dataclasses.replace(other, overwrite=True))
    assert "exact" in {layer.kind for layer in predictors.layers}
    assert (folder / "work" / "layers" / "000.safetensors").stat().st_mtime_ns == layer.st_mtime_ns
    told = Mock(wraps=NoProgress())
    fixed = dataclasses.replace(OPTIONS, ranks=8, overwrite=True)
    predictors = train_predictors(tiny_model, profile, folder, fixed, told)
    told.say.assert_called_once_with(f"{folder}: was begun from other inputs, and starts anew")
    assert [layer.rank for layer in predictors.layers] == [8, 8]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="not overwritten"):
        train_predictors(tiny_model, profile, tmp_path / "other", fixed)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["letters.txt"]


def test_predictors_stay_until_others_take_their_place(
    trained: Path, tiny_model: Path, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(trained, folder)
    (folder / "notes.txt").write_text("mine")
    fixed = dataclasses.replace(OPTIONS, ranks=8, overwrite=True)

    class EndedError(BaseException):
        """Stands for the end of the process."""

    def end(*_: object) -> None:
        raise EndedError

    with monkeypatch.context() as patch, pytest.raises(EndedError):
        patch.setattr("picompile.output.place.OutputPath._put_folder", end)
        train_predictors(tiny_model, profile, folder, fixed)
    results = ("predictors.json", "predictors.safetensors")
    assert [(folder / name).read_bytes() for name in results] == [(trained / name).read_bytes() for name in results]
    # They are still known to be of their own inputs.
    told, before = Mock(wraps=NoProgress()), _bytes(folder)
    train_predictors(tiny_model, profile, folder, OPTIONS, told)
    told.say.assert_called_once_with(f"{folder}: is complete already")
    assert not told.step.called and _bytes(folder) == before
    assert [layer.rank for layer in train_predictors(tiny_model, profile, folder, fixed).layers] == [8, 8]
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_the_profile_says_which_neurons_fire(tiny_model: Path, profile: Profile, tmp_path: Path) -> None:
    layers = tuple(dataclasses.replace(layer, threshold=0.1 + layer.layer) for layer in profile.layers)
    changed = dataclasses.replace(profile, layers=layers, thresholds={"by": "contribution"})
    run = _TrainingRun(tiny_model, changed, OPTIONS, NoProgress(), TrainingDirectory(tmp_path), "")
    expected = {0: FiringRule(0.1, "contribution"), 1: FiringRule(1.1, "contribution")}
    assert run.prepare(1)[0].rule == expected[1]
    selection = Selection.first([0, 1], 0.9, ChoiceLimits(1, 1.0, True), {})
    assert run._accuracy_check(selection).rules == expected


def test_signs_are_only_searched_for_a_threshold(tiny_model: Path, profile: Profile, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, kind="sign", budget=0.001)
    predictors = train_predictors(tiny_model, profile, tmp_path / "p", options)
    assert {layer.kind for layer in predictors.layers} == {"sign"}
    assert predictors.parameters == 0
    assert all(0.3 < layer.threshold < 0.7 and (layer.weighted_recall or 0) >= 0.9 for layer in predictors.layers)


def test_beyond_the_bound_layers_grow_until_none_can(
    trained: Path, tiny_model: Path, profile: Profile, tmp_path: Path
) -> None:
    dense = load_predictors(trained).accuracy["dense_perplexity"]
    change = abs(load_predictors(trained).accuracy["perplexity"] / dense - 1)
    told = Mock(wraps=NoProgress())
    with pytest.raises(AccuracyError, match=r"the perplexity rises by .*most is missed in layers") as refused:
        # A rise of less than nothing cannot be met by what misses anything.
        strict = dataclasses.replace(OPTIONS, accuracy_bound=-1.0, rounds=2)
        train_predictors(tiny_model, profile, tmp_path / "p", strict, told)
    assert refused.value.exit_code == 7
    assert set(refused.value.layers) <= {0, 1} and refused.value.layers
    assert sum("get larger predictors" in call.args[0] for call in told.say.call_args_list) == 2
    assert not (tmp_path / "p" / "predictors.json").exists()
    with pytest.raises(UsageError, match="neither"):
        load_predictors(tmp_path / "p")
    loose = dataclasses.replace(OPTIONS, accuracy_bound=2 * change + 0.01)
    assert train_predictors(tiny_model, profile, tmp_path / "p", loose).accuracy["rounds"] == 0


def test_tightening_misses_less_without_training(
    tiny_model: Path, profile: Profile, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(trained, folder)
    before = load_predictors(folder)
    after = tighten(folder, [1])
    assert after is not None
    assert after.layers[0] == before.layers[0]
    assert (after.layers[1].weighted_recall or 0) >= 0.95
    assert load_predictors(folder).layers == after.layers
    again = tighten(folder, [1])
    assert again is not None and (again.layers[1].weighted_recall or 0) >= 0.975
    with pytest.raises(UsageError, match="no layer 7"):
        tighten(folder, [7])
    exact = dataclasses.replace(OPTIONS, exact=True, budget=1e-9, overwrite=True)
    assert {layer.kind for layer in train_predictors(tiny_model, profile, folder, exact).layers} == {"exact"}
    assert tighten(folder, [0, 1]) is None
    shutil.rmtree(folder / "work")
    assert tighten(folder, [1]) is None


def test_a_profile_that_does_not_fit_its_model_is_refused(
    tiny_model: Path, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(forged: Profile, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            train_predictors(tiny_model, forged, tmp_path / "predictors", OPTIONS)
        assert not (tmp_path / "predictors").exists()

    first, *others = profile.layers
    for wrong in ({"neurons": first.neurons + 1}, {"neurons": 1}):
        forged = dataclasses.replace(profile, layers=(dataclasses.replace(first, **wrong), *others))
        refused(forged, "layer 0 is another block than the model's")
    refused(dataclasses.replace(profile, hidden=profile.hidden * 2), "another block")
    refused(dataclasses.replace(profile, layers=tuple(others)), "has 1 layers, the model 2")
    for token in (-1, 1 << 20):
        monkeypatch.setattr(Profile, "held_out", lambda self, token=token: [[1, token]])
        refused(profile, "tokens that the model does not have")
    with pytest.raises(UsageError, match="profile of another model"):
        train_predictors(BUNDLED_MODEL, profile, tmp_path / "predictors", OPTIONS)
    for change in ({"kind": "magic"}, {"budget": 0.0}, {"recall": 1.5}, {"ranks": 0}, {"ranks": {1: -1}}, {"jobs": -1}):
        with pytest.raises(UsageError):
            dataclasses.replace(OPTIONS, **change)


@pytest.mark.parametrize("content", ["{", "[]", '{"targets": {"0": null}, "measured": {}}'])
def test_damaged_notes_on_the_choice_are_made_again(
    trained: Path, tiny_model: Path, profile: Profile, tmp_path: Path, content: str
) -> None:
    folder = tmp_path / "predictors"
    shutil.copytree(trained, folder)
    (folder / "predictors.json").unlink()
    (folder / "work" / "choice.json").write_text(content)
    train_predictors(tiny_model, profile, folder, OPTIONS)
    for name in ("predictors.json", "predictors.safetensors", "work/choice.json"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes(), name


def test_candidates_in_bfloat16_are_others(tiny_model: Path, trained: Path, profile: Profile) -> None:
    every = [dataclasses.replace(OPTIONS, bf16=bf16) for bf16 in (False, True)]
    directory = TrainingDirectory(trained)
    runs = [_TrainingRun(tiny_model, profile, options, NoProgress(), directory, "") for options in every]
    assert runs[0].candidate_inputs != runs[1].candidate_inputs
    assert [run.prepare(0)[1].bf16 for run in runs] == [False, True]
