"""Sources of a report and figures of firing: what is read, what is counted by hand, what is refused in one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.report_folders import FINGERPRINT, predictor_row, write_artifact, write_predictors, write_profile
from picompile.errors import UsageError
from picompile.predictors.store import Predictors
from picompile.report import numbers
from picompile.report.artifact_facts import ArtifactFacts
from picompile.report.page import read_sources
from picompile.report.profile import FiringProfile, firing_curve, sampled, share_for, summarize
from picompile_runtime import ArtifactError


def test_a_profile_gives_its_counts(tmp_path: Path) -> None:
    counts = write_profile(tmp_path / "c", seed=2)
    write_predictors(tmp_path / "b", [predictor_row(0, 1)])
    write_artifact(tmp_path / "a")
    found = read_sources([tmp_path / name for name in "abc"])
    assert [type(source) for source in found] == [ArtifactFacts, Predictors, FiringProfile]
    profile = found[2]
    assert isinstance(profile, FiringProfile)
    assert profile.of.fingerprint == FINGERPRINT
    for found_counts, values in zip(profile.counts.values(), counts, strict=True):
        np.testing.assert_array_equal(found_counts, values)
    assert profile.model_figures().firing_share == pytest.approx(np.concatenate(counts).mean() / (8 * 24))
    assert profile.figures()[2].never_fired >= 1


def test_an_artifact_gives_bytes_by_operator_and_part(tmp_path: Path) -> None:
    write_artifact(tmp_path / "artifact")
    (artifact,) = read_sources([tmp_path / "artifact"])
    assert isinstance(artifact, ArtifactFacts)
    # The table that the head reads too is the embedding's.
    assert artifact.operator_bytes == {"embedding": 700, "ffn": 700, "predict": 70, "other": 9}
    assert [(part.part, part.weight_bytes) for part in artifact.parts] == [("hot", 100), ("cold", 200), ("all", 400)]
    assert artifact.predictor_bytes == {0: 70}
    assert artifact.accuracy is None


def test_a_compiled_artifact_is_read(tiny_artifact: Path) -> None:
    (artifact,) = read_sources([tiny_artifact])
    assert isinstance(artifact, ArtifactFacts)
    assert set(artifact.operator_bytes) == {"embedding", "linear", "norm", "attention", "ffn", "head"}
    report = json.loads((tiny_artifact / "report.json").read_text())
    assert sum(artifact.operator_bytes.values()) == sum(report["weight_bytes"].values())
    assert sum(part.weight_bytes for part in artifact.parts) == artifact.operator_bytes["ffn"]
    parts = [(part.layer, part.neurons, part.predictor) for part in artifact.parts]
    assert parts == [(layer, 200, "exact") for layer in (0, 1)]


def test_the_cost_in_accuracy_is_read(tmp_path: Path) -> None:
    rows = [{**predictor_row(layer, 5), "missed_energy": 0.001} for layer in range(2)]
    accuracy = {"dense_perplexity": 9.5, "perplexity": 9.501, "relative_change": 0.0001, "tokens": 77, "layers": rows}
    write_artifact(tmp_path / "artifact", accuracy=accuracy)
    (artifact,) = read_sources([tmp_path / "artifact"])
    assert isinstance(artifact, ArtifactFacts)
    assert artifact.accuracy is not None
    assert artifact.accuracy.figures == {**{key: accuracy[key] for key in accuracy if key != "layers"}, "bound": None}
    for layer, row in zip(artifact.accuracy.layers, rows, strict=True):
        assert (layer.rank, layer.recall, layer.missed_energy) == (row["rank"], row["recall"], 0.001)
        assert layer.computed_ratio == pytest.approx(row["computed_share"] / row["firing_share"])


def refused(*paths: Path) -> str:
    with pytest.raises((UsageError, ArtifactError)) as raised:
        read_sources(paths)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_paths_that_are_no_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("[]")
    assert "no such folder or file" in refused(tmp_path / "missing")
    assert "neither a folder nor a plan" in refused(tmp_path / "file")
    assert "holds none of profile.json, predictors.json, manifest.json" in refused(tmp_path / "empty")
    write_profile(tmp_path / "both", seed=1)
    (tmp_path / "both" / "manifest.json").write_text("{}")
    assert "profile.json and manifest.json" in refused(tmp_path / "both")
    # All are looked at before one is read.
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "profile.json").write_text("{")
    assert "no such folder" in refused(tmp_path / "damaged", tmp_path / "missing")


@pytest.mark.parametrize("marker", ["profile.json", "predictors.json", "manifest.json"])
def test_damaged_files_are_refused(tmp_path: Path, marker: str) -> None:
    for content in (b"", b"{", b"[]", b"null", b'{"format": "other"}', b"\xff\xfe", b'{"schema": 1}'):
        (tmp_path / marker).write_bytes(content)
        assert str(tmp_path) in refused(tmp_path)


def test_impossible_values_are_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    write_predictors(tmp_path / "predictors", [{**predictor_row(0, 1, kind="exact"), "layer": 10**400}])
    assert "which no model has" in refused(tmp_path / "predictors")
    profile = tmp_path / "profile"
    write_profile(profile, seed=1, layers=1, neurons=2)
    file = profile / "layers" / "000.safetensors"
    tensors = load_file(file)
    for counts in ([-1, 3], [1, 10**9], []):
        save_file({**tensors, "counts": torch.tensor(counts, dtype=torch.int64)}, file)
        refused(profile)
    save_file({**tensors, "counts": torch.ones(2, dtype=torch.bfloat16)}, file)
    assert "'counts' BF16 [2]" in refused(profile)
    save_file(tensors, file)
    facts = json.loads((profile / "profile.json").read_text())
    for threshold in ("x", None, 10**400, float("nan")):
        facts["layers"][0]["threshold"] = threshold
        (profile / "profile.json").write_text(json.dumps(facts))
        assert "layers[0]: threshold must be a number" in refused(profile)


@pytest.mark.parametrize("name", ["program.json", "report.json"])
def test_damaged_artifacts_are_refused(tmp_path: Path, name: str) -> None:
    write_artifact(tmp_path / "artifact")
    file = tmp_path / "artifact" / name
    for content in (b"{}", b'{"functions": [], "ffn": {}, "weight_bytes": {"a": "b"}}'):
        file.write_bytes(content)
        assert "artifact" in refused(tmp_path / "artifact")
    file.unlink()
    assert "artifact" in refused(tmp_path / "artifact")


def by_hand(counts: list[int], firings: float) -> float:
    """The smallest share of the neurons that makes this share of the firings."""
    made = 0
    for taken, count in enumerate(sorted(counts, reverse=True), 1):
        made += count
        if made >= firings * sum(counts):
            return taken / len(counts)
    raise AssertionError


@pytest.mark.parametrize("seed", [0, 4])
def test_shares_are_those_counted_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 50, 7 + 9 * seed)
    curve = firing_curve(counts)
    assert curve[0] == 0
    assert curve[-1] == pytest.approx(1)
    assert (np.diff(curve) >= 0).all()
    # A concave curve: who comes later fires less.
    assert (np.diff(curve, 2) <= 1e-12).all()
    for firings in (0.05, 0.5, 0.8, 0.99):
        assert share_for(curve, firings) == by_hand(counts.tolist(), firings)


def test_figures_of_a_model_are_of_all_its_neurons() -> None:
    random = np.random.default_rng(3)
    layers = [random.integers(0, 90, 31), random.integers(0, 9, 64)]
    layers[0][4] = 0
    model = summarize(layers, 100)
    together = np.concatenate(layers)
    assert model.neurons == 95
    assert model.firing_share == pytest.approx(together.sum() / 95 / 100)
    assert model.never_fired == (together == 0).sum() > 0
    assert model.neurons_for_80_percent == by_hand(together.tolist(), 0.8)
    # The most active fifth: 19 of 95.
    assert model.skewness == pytest.approx(np.sort(together)[-19:].sum() / together.sum())


@pytest.mark.parametrize("neurons", [1, 100, 5000])
def test_a_sampled_curve_keeps_its_ends_and_its_points(neurons: int) -> None:
    curve = firing_curve(np.random.default_rng(neurons).integers(1, 99, neurons))
    x, y = sampled(curve)
    assert len(x) <= 160
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 100, pytest.approx(100))
    assert (np.diff(x) > 0).all()
    places = np.rint(x / 100 * neurons).astype(int)
    np.testing.assert_allclose(y, 100 * curve[places])


def test_values_that_are_no_measurements_are_none() -> None:
    for value in (None, True, "1", [], float("nan"), float("inf"), 10**400, 1e300):
        assert (numbers.measured(value), numbers.share(value), numbers.whole(value)) == (None, None, None)
    assert (numbers.whole(-1), numbers.share(1.1), numbers.share(-0.1)) == (None, None, None)
    assert (numbers.share(1 + 1e-9), numbers.share(0)) == (1, 0)
