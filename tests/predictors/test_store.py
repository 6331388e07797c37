"""Predictor folders: what is written is read, and what is wrong is one line."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.damage import damages, replaced
from picompile.cli.train import _show as show_predictors
from picompile.errors import UsageError
from picompile.frontend.weight_sources import ModuleWeights
from picompile.predictors.files import load_predictors, write_predictors
from picompile.predictors.store import BlockShape, LayerPredictor
from picompile_passes.errors import PassOptionError
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

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
    write_predictors(tmp_path / "p", LAYERS, _tensors(), MODEL, {"met": True}, [{"layer": 0}])
    return tmp_path / "p"


def test_written_predictors_are_read_back(tmp_path: Path) -> None:
    tensors = _tensors()
    write_predictors(tmp_path / "p", LAYERS, tensors, MODEL, {"met": True}, [{"layer": 0}])
    read = load_predictors(tmp_path / "p")
    assert read.layers == tuple(sorted(LAYERS, key=lambda layer: layer.layer))
    assert (read.fingerprint, read.name) == ("ab" * 16, "some-model")
    assert (read.accuracy, read.curves) == ({"met": True}, [{"layer": 0}])
    for name, tensor in tensors.items():
        _, layer, part = name.split(".")
        assert torch.equal(read.tensor(int(layer), part), tensor)
    read.require_model("ab" * 16, BLOCKS)
    read.require_model(None, BLOCKS)
    # Predictors are the same bytes in whatever order they come, rounded to f16; what is given is left alone.
    given = {name: tensor.float() * (1 + 1e-5) for name, tensor in reversed(tensors.items())}
    before = {name: tensor.clone() for name, tensor in given.items()}
    write_predictors(tmp_path / "q", LAYERS[::-1], given, MODEL, {"met": True}, [{"layer": 0}])
    for name in ("predictors.json", "predictors.safetensors"):
        assert (tmp_path / "p" / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
    assert all(torch.equal(given[name], before[name]) for name in before)


def test_a_predictor_of_the_wrong_shape_is_not_written(tmp_path: Path, folder: Path) -> None:
    before = (folder / "predictors.safetensors").read_bytes()
    with pytest.raises(ValueError, match="layer 2"):
        write_predictors(folder, LAYERS, _tensors() | {"layers.2.fc2": torch.zeros(NEURONS, 12)}, MODEL)
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


@pytest.mark.parametrize("quant", ["f16", "q4"])
def test_matrices_can_have_the_values_of_a_format(folder: Path, quant: str) -> None:
    predictors = load_predictors(folder)
    stored, rounded = (predictors.weights(ModuleWeights({}), form) for form in (None, quant))
    for name in stored.names():
        before, after = stored.load(name), rounded.load(name)
        if before.dim() == 2:
            before = dequantize_rows(quantize_rows(before, quant), quant, before.shape[1])
        assert torch.equal(after, before.to(after.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bare_file_is_learned_at_threshold_zero(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors().items()}
    # Layers with numbers that no model has are not found, nor what is something else.
    named = {f"layers.{number}.fc1": torch.zeros(2) for number in ("10000", "1" * 5000, "00", "-1")}
    save_file(tensors | named | {"other": torch.zeros(2)}, tmp_path / "predictors.safetensors")
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
        ({"layers": []}, "layers must be a list of layers in order, each once"),
        ({"layers": [{"layer": 0, "kind": "learned"}]}, "input must be given for a layer of kind learned"),
        ({"layers": [{"layer": 0, "kind": "sign"}]}, "threshold must be given for a layer of kind sign"),
        ({"layers": [{"layer": -1, "kind": "exact"}]}, r"layers\[0\]: layer must be an integer from 0 to 9999"),
        ({"layers": [{"layer": 10**400, "kind": "exact"}]}, "beyond which no model has layers"),
        ({"layers": [{"layer": 0, "kind": "exact"}, {"layer": 0, "kind": "none"}]}, "in order, each once"),
        ({"layers": [{"layer": 0, "kind": "exact", "threshold": "low"}]}, "threshold must be a number"),
        ({"model": {"parameters": "many"}}, "parameters must be an integer from 1"),
        ({"accuracy": {"perplexity": "low"}}, "accuracy: perplexity must be a finite number, but is 'low'"),
        ({"curves": {}}, "curves must be a list"),
    ],
)
def test_wrong_facts_are_refused(folder: Path, change: dict[str, object], says: str) -> None:
    facts = folder / "predictors.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | change))
    with pytest.raises(UsageError, match=says) as refused:
        load_predictors(folder)
    assert "\n" not in str(refused.value)


def loads_or_is_refused(folder: Path, content: Any) -> None:
    """Whatever the facts say: one line that can be printed, or predictors that can be shown and used."""
    (folder / "predictors.json").write_text(json.dumps(content))
    try:
        read = load_predictors(folder)
        read.require_model(None, BLOCKS)
        read.insert_pass()
    except (UsageError, PassOptionError) as error:
        assert str(error).isprintable()
        assert len(str(error)) < 600
        return
    assert [layer.layer for layer in read.layers] == [0, 1, 2]
    show_predictors(read)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Predictors of which only the facts are damaged, and written anew every time; and these facts."""
    folder = tmp_path_factory.mktemp("described") / "p"
    gate = {"bound": 0.001, "dense_perplexity": 9.5, "perplexity": 9.6, "relative_change": 0.0105, "tokens": 126}
    model = {**MODEL, "parameters": 10_000}
    write_predictors(folder, LAYERS, _tensors(), model, gate, [{"layer": 0, "points": [{"recall": 0.5}]}])
    return folder, json.loads((folder / "predictors.json").read_text())


def test_names_and_figures_that_cannot_be_shown(folder: Path) -> None:
    facts = folder / "predictors.json"
    content = replaced(json.loads(facts.read_text()), ("layers", 0, "recall"), float("nan"))
    content = replaced(content, ("model", "name"), "\udcff\u4e2d")
    facts.write_text(json.dumps(replaced(content, ("accuracy", "perplexity"), float("inf"))))
    read = load_predictors(folder)
    assert (read.name, read.layers[0].recall, read.accuracy["perplexity"]) == ("?\u4e2d", None, float("inf"))


@settings(max_examples=10)
@given(data=st.data())
def test_anything_in_any_places(data: st.DataObject, described: tuple[Path, Any]) -> None:
    folder, content = described
    for damaged in damages(data, content):
        loads_or_is_refused(folder, damaged)


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
    for text in ("{", "[" * 100_000, '{"x":' * 100_000, '{"format": "picompile-predictors", "format": 1}'):
        (folder / "predictors.json").write_text(text)
        with pytest.raises(UsageError, match="not readable as JSON"):
            load_predictors(folder)
    with pytest.raises(UsageError, match=r"neither predictors\.json nor"):
        load_predictors(folder.parent)
