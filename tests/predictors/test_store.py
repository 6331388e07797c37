"""Predictor folders: what is written is read, and what is wrong is one line."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from picompile.checkpoint import ModuleWeights
from picompile.errors import UsageError
from picompile.predictors import BlockShape, LayerPredictor, load_predictors, save_predictors

HIDDEN, NEURONS = 29, 71
RANKS = {0: 5, 2: 11}
BLOCKS = {layer: BlockShape(NEURONS, HIDDEN) for layer in range(3)}
MODEL = {"fingerprint": "ab" * 16, "name": "some-model"}
LAYERS = (
    LayerPredictor(2, "learned-relu", "previous", 11, 0.25, 11 * 100 + 71, 2 * (11 * 100 + 71), 0.9, 0.99, 0.7),
    LayerPredictor(1, "exact"),
    LayerPredictor(0, "learned", "stream", 5, -1.5, 5 * 100 + 71, 2 * (5 * 100 + 71), skewness=0.6),
)


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return {
        f"layers.{layer}.{part}": torch.randn(shape, generator=generator).half()
        for layer, rank in RANKS.items()
        for part, shape in (("fc1", (rank, HIDDEN)), ("fc2", (NEURONS, rank)), ("bias", (NEURONS,)))
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_predictors(tmp_path / "p", LAYERS, _tensors(), MODEL, {"met": True}, [{"layer": 0}])
    return tmp_path / "p"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    tensors = _tensors()
    save_predictors(tmp_path / "p", LAYERS, tensors, MODEL, {"met": True}, [{"layer": 0}])
    read = load_predictors(tmp_path / "p")
    assert read.layers == tuple(sorted(LAYERS, key=lambda layer: layer.layer))
    assert (read.fingerprint, read.name, read.gate, read.curves) == (
        "ab" * 16,
        "some-model",
        {"met": True},
        [{"layer": 0}],
    )
    for name, tensor in tensors.items():
        _, layer, part = name.split(".")
        assert torch.equal(read.tensor(int(layer), part), tensor)
    read.require_model("ab" * 16, BLOCKS)
    read.require_model(None, BLOCKS)


def test_the_same_predictors_are_the_same_bytes(tmp_path: Path) -> None:
    tensors = _tensors()
    save_predictors(tmp_path / "a", LAYERS, tensors, MODEL)
    save_predictors(tmp_path / "b", LAYERS[::-1], dict(reversed(tensors.items())), MODEL)
    for name in ("predictors.json", "predictors.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_values_are_rounded_to_f16_and_the_given_ones_are_left_alone(tmp_path: Path) -> None:
    tensors = {name: tensor.float() + 1e-5 for name, tensor in _tensors().items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    save_predictors(tmp_path / "p", LAYERS, tensors, MODEL)
    stored = load_file(tmp_path / "p" / "predictors.safetensors")
    assert all(torch.equal(stored[name], before[name].half()) for name in before)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_a_predictor_of_the_wrong_shape_is_not_written(tmp_path: Path, folder: Path) -> None:
    before = (folder / "predictors.safetensors").read_bytes()
    with pytest.raises(ValueError, match="layer 2"):
        save_predictors(folder, LAYERS, _tensors() | {"layers.2.fc2": torch.zeros(NEURONS, 12)}, MODEL)
    assert (folder / "predictors.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_weights_lie_over_those_of_the_model(folder: Path) -> None:
    base = ModuleWeights({"down": torch.ones(3, 2)})
    weights = load_predictors(folder).weights(base)
    assert set(weights.names()) == {"down", *(f"predictors.{name}" for name in _tensors())}
    assert weights.shape("predictors.layers.2.fc1") == (11, HIDDEN)
    assert weights.shape("down") == (3, 2)
    assert torch.equal(weights.load("down"), torch.ones(3, 2))
    stored = load_file(folder / "predictors.safetensors")
    assert torch.equal(weights.load("predictors.layers.0.bias"), stored["layers.0.bias"])
    with pytest.raises(KeyError):
        weights.load("predictors.layers.1.fc1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bare_file_is_learned_at_threshold_zero(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors().items()}
    save_file(tensors | {"other": torch.zeros(2)}, tmp_path / "predictors.safetensors")
    for path in (tmp_path, tmp_path / "predictors.safetensors"):
        read = load_predictors(path)
        assert [(p.layer, p.kind, p.input, p.rank, p.threshold) for p in read.layers] == [
            (0, "learned", "block", 5, 0.0),
            (2, "learned", "block", 11, 0.0),
        ]
        assert [p.parameters for p in read.layers] == [5 * 100 + 71, 11 * 100 + 71]
        assert read.fingerprint is None
        assert "other" not in read.headers


def test_another_model_is_refused(folder: Path) -> None:
    read = load_predictors(folder)
    with pytest.raises(UsageError, match="another model"):
        read.require_model("cd" * 16, BLOCKS)
    with pytest.raises(UsageError, match="no predictor for layer 3"):
        read.require_model(None, BLOCKS | {3: BlockShape(NEURONS, HIDDEN)})
    with pytest.raises(UsageError, match="layer 2 is not in the model"):
        read.require_model(None, {0: BLOCKS[0], 1: BLOCKS[1]})
    with pytest.raises(UsageError, match=r"fc1 of layer 0 is \[5, 29\], but the model needs \[5, 30\]"):
        read.require_model(None, BLOCKS | {0: BlockShape(NEURONS, HIDDEN + 1)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers.2.fc1": torch.zeros(12, HIDDEN)}, "layer 2"),
        ({"layers.0.fc1": torch.zeros(6, HIDDEN), "layers.0.fc2": torch.zeros(NEURONS, 6)}, "rank 5"),
        ({"layers.0.bias": torch.zeros(NEURONS + 1)}, "layer 0"),
        ({"layers.0.fc2": torch.full((NEURONS, 5), float("nan"))}, "layers.0.fc2 holds values that are no numbers"),
        ({"layers.2.bias": torch.full((NEURONS,), float("inf"))}, "layers.2.bias holds values that are no numbers"),
        ({"layers.2.bias": torch.zeros(NEURONS, dtype=torch.int32)}, "I32"),
        ({"layers.2.bias": None}, "no tensor layers.2.bias"),
    ],
)
def test_wrong_tensors_are_refused(folder: Path, change: dict[str, Tensor | None], says: str) -> None:
    tensors = _tensors() | change
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "predictors.safetensors")
    with pytest.raises(UsageError, match=says) as refused:
        load_predictors(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "picompile-profile"}, "not the facts"),
        ({"schema": 2}, "schema 2"),
        ({"layers": []}, "no layers"),
        ({"layers": [{"layer": 0, "kind": "learned"}]}, "input"),
        ({"layers": [{"layer": -1, "kind": "exact"}]}, "layer number"),
        ({"layers": [{"layer": 0, "kind": "exact"}, {"layer": 0, "kind": "none"}]}, "twice"),
        ({"layers": [{"layer": 0, "kind": "exact", "threshold": "low"}]}, "threshold"),
        ({"layers": 7}, "not the facts"),
        ({"model": None}, "model"),
    ],
)
def test_wrong_facts_are_refused(folder: Path, change: dict[str, object], says: str) -> None:
    facts = folder / "predictors.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | change))
    with pytest.raises(UsageError, match=says) as refused:
        load_predictors(folder)
    assert "\n" not in str(refused.value)


def test_damaged_files_are_refused(folder: Path) -> None:
    weights = folder / "predictors.safetensors"
    whole = weights.read_bytes()
    for cut in random.sample(range(len(whole)), 12):
        weights.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="cannot be read"):
            load_predictors(folder)
    weights.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        load_predictors(folder)
    (folder / "predictors.json").write_text("{")
    with pytest.raises(UsageError, match="not readable as JSON"):
        load_predictors(folder)
    with pytest.raises(UsageError, match=r"neither predictors\.json nor"):
        load_predictors(folder.parent)
