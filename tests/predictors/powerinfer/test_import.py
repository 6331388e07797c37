"""Files as PowerInfer writes them: forged headers, and import by the guarded process, held against numpy."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from helpers.gguf_files import damaged
from helpers.powerinfer_files import (
    TYPES,
    Predictor,
    Sizes,
    forged,
    random_predictors,
    reference_mask,
    stored,
    write_activations,
    write_folder,
    write_gguf,
)
from picompile.errors import DoesNotFitError, UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.predictors.files import load_predictors
from picompile.predictors.powerinfer.child import RefusedError, read_activations, read_files
from picompile.predictors.powerinfer.guard import GuardLimits, read_guarded
from picompile.predictors.powerinfer.importer import (
    check_by_config,
    computes_above,
    import_predictors,
    read_predictors,
)
from picompile.predictors.powerinfer.sources import PredictorSource, find_source
from picompile.predictors.profile.files import write_tensors
from picompile.predictors.store import Predictors
from picompile_passes.predictors import predictor_kind

# Those of `tiny_model`.
SIZES = Sizes(hidden=96, neurons=200, ranks=(32, 64))


def imported(source: Path, model: Path, output: Path) -> Predictors:
    import_predictors(find_source(source), model, output)
    return load_predictors(output)


def test_forged_headers_are_refused_or_change_nothing(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.powerinfer.gguf"
    write_gguf(file, random_predictors(SIZES, 1), threshold=0.25)
    whole = find_source(file)
    assert whole.threshold == 0.25
    assert whole.shapes == {0: {"fc1": (32, 96), "fc2": (200, 32)}, 1: {"fc1": (64, 96), "fc2": (200, 64)}}
    places = {entry.name: entry for parts in whole.tensors.values() for entry in parts.values()}
    refused = 0
    for what, data in (*forged(file), *damaged(file, 400, seed=3)):
        path = tmp_path / "forged.gguf"
        path.write_bytes(data)
        try:
            source = find_source(path)
            check_by_config(path, source.shapes, tiny_model)
        except UsageError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and len(str(error)) < 400 and str(error).isprintable(), what
            continue
        found = {entry.name: entry for parts in source.tensors.values() for entry in parts.values()}
        assert found == places, what
    # What is left are flips in data, and in metadata and names that nobody reads.
    assert refused > 280


def test_places_without_predictors(tmp_path: Path) -> None:
    for name in ("empty", "two", "pipe", "torch"):
        (tmp_path / name).mkdir()
    for name in ("empty.gguf", "two/a.gguf", "two/b.gguf"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe" / "model.gguf")
    os.mkfifo(tmp_path / "torch" / "model_0.pt")
    files = (("blk.0.gpu_idx", "split.gguf", 32), ("blk.0.ffn_up.weight", "model.gguf", 32), ("x", "odd.gguf", 12))
    for tensor, name, alignment in files:
        writer = GGUFWriter(tmp_path / name, "generic.gpu_index")
        writer.add_uint32("general.alignment", alignment)
        writer.add_tensor(tensor, np.zeros(64, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for name, says in (
        ("nothing", "no such file or folder"),
        ("empty.gguf", "0 bytes are no GGUF file"),
        ("empty", "neither *.gguf nor model_0.pt is there"),
        ("two", "holds 2 GGUF files; name one of them"),
        # Pipes are not waited for.
        ("pipe", "not a file"),
        ("torch", "not a file"),
        ("split.gguf", "a GPU split"),
        ("model.gguf", "a model without predictors"),
        ("odd.gguf", "not a power of two"),
    ):
        with pytest.raises(UsageError) as caught:
            find_source(tmp_path / name)
        assert says in str(caught.value), name


@pytest.mark.parametrize("type_name", TYPES)
def test_arrays_of_each_type(tmp_path: Path, type_name: str) -> None:
    predictors = random_predictors(SIZES, seed=len(type_name) + 1)
    write_gguf(tmp_path / "a.gguf", predictors, type_name)
    shapes, counts, found = read_predictors(find_source(tmp_path / "a.gguf"), tmp_path)
    assert (len(found), counts) == (6, {})
    for layer, predictor in enumerate(predictors):
        for part, values in zip(("fc1", "fc2"), predictor, strict=True):
            tensor = found[f"layers.{layer}.{part}"]
            assert tensor.dtype == torch.float16 and shapes[layer][part] == values.shape
            np.testing.assert_array_equal(tensor.numpy(), stored(values, type_name))


def test_numbers_of_a_gguf_file_that_f16_has_not(tmp_path: Path, tiny_model: Path) -> None:
    predictors = random_predictors(SIZES, 4)
    for wrong in (np.nan, 1e6):
        predictors[1][1][3, 5] = wrong
        write_gguf(tmp_path / "a.gguf", predictors, "F32")
        with pytest.raises(UsageError, match=r"blk\.1\.fc2\.weight holds values that are no numbers, or too large"):
            import_predictors(find_source(tmp_path / "a.gguf"), tiny_model, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_gguf(tmp_path: Path, tiny_model: Path) -> None:
    predictors = random_predictors(SIZES, 3)
    write_gguf(tmp_path / "a.powerinfer.gguf", predictors, "Q8_0", threshold=0.375)
    found = imported(tmp_path / "a.powerinfer.gguf", tiny_model, tmp_path / "out")
    assert_masks(found, [(stored(fc1, "Q8_0"), stored(fc2, "Q8_0")) for fc1, fc2 in predictors], 0.375)
    assert found.fingerprint == fingerprint(tiny_model) and found.name == tiny_model.name
    first = found.layers[0]
    assert (first.kind, first.input, first.rank) == ("learned-relu", "stream", 32)
    assert (first.parameters, first.bytes_f16) == (32 * 296 + 200, 2 * (32 * 296 + 200))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.powerinfer.gguf", "out"]


def assert_masks(found: Predictors, expected: list[Predictor], threshold: float) -> None:
    """The masks are ggml's, and the arrays bit for bit those of `expected`."""
    x = torch.randn(37, SIZES.hidden)
    x[3] = 0  # every logit is zero
    for layer, predictor in zip(found.layers, expected, strict=True):
        weights = [found.tensor(layer.layer, part).float() for part in ("fc1", "fc2", "bias")]
        for array, values in zip(weights, predictor, strict=False):
            np.testing.assert_array_equal(array.numpy(), values)
        assert not weights[2].any()
        mask = predictor_kind(layer.kind).evaluate(x, weights, layer.threshold).numpy()
        assert mask[3].all() == (threshold <= 0)
        wrong = mask != reference_mask(x.numpy(), predictor, threshold)
        logits = np.maximum(x.numpy() @ predictor[0].T, 0) @ predictor[1].T
        # Two orders of summation may disagree where a logit is next to the threshold, and nowhere else.
        assert (np.abs(logits[wrong] - threshold) < 1e-3).all()


@pytest.mark.slow("captures a model; a folder without statistics is fast")
def test_folder_with_statistics(tmp_path: Path, tiny_model: Path) -> None:
    predictors = random_predictors(SIZES, 5)
    write_folder(tmp_path / "in", predictors)
    counts = [torch.randint(0, 10**6, (200,)), torch.randint(0, 1000, (200,)).float()]
    write_activations(tmp_path / "in" / "activation", counts)
    found = imported(tmp_path / "in", tiny_model, tmp_path / "out")
    assert_masks(found, predictors, 0.0)
    for layer, expected in enumerate(counts):
        kept = load_file(tmp_path / "out" / "layers" / f"{layer:03}.safetensors")["counts"]
        assert kept.dtype == np.int64 and np.array_equal(kept, expected.long())


def test_folders_that_are_refused(tmp_path: Path) -> None:
    """Thresholds that are no numbers, and files that torch.save did not write."""
    write_folder(tmp_path, random_predictors(SIZES, 5), threshold=-0.75)
    assert find_source(tmp_path).threshold == -0.75
    huge = [f'{{"sparse_threshold": {number}}}' for number in (10**400, "1e300", "-3.5e38")]
    for text in ('{"sparse_threshold": "0"}', '{"sparse_threshold": NaN}', "[]", "[" * 100_000, "no JSON", *huge):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=r"config\.json: (sparse_threshold is .*, not a number|not )"):
            find_source(tmp_path)
    (tmp_path / "config.json").unlink()
    file = tmp_path / "model_0.pt"
    whole = file.read_bytes()
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)
    for data in (b"", whole[: len(whole) // 2], file.read_bytes(), b"text"):
        file.write_bytes(data)
        with pytest.raises(UsageError, match=r"model_0\.pt: not a file of torch\.save"):
            find_source(tmp_path)


def test_statistics_are_counts_or_shares(tmp_path: Path) -> None:
    shares = torch.rand(2, 200)
    write_activations(tmp_path, list(shares))
    found = read_activations({str(layer): str(tmp_path / f"activation_{layer}.pt") for layer in range(2)})
    for counts, expected in zip(found.values(), shares, strict=True):
        assert counts.equal((expected.double() * 1e6).round().long())
    for counts, says in (
        (-torch.ones(200), "values that are no counts"),
        (torch.full((200,), float("nan")), "values that are no counts"),
        (torch.ones(2, 100), "not one number a neuron"),
        ({"counts": torch.ones(200)}, "no tensor of numbers"),
    ):
        torch.save(counts, tmp_path / "activation_0.pt")
        with pytest.raises(RefusedError, match=says):
            read_activations({"0": str(tmp_path / "activation_0.pt")})


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (Sizes(96, 200, (32,)), "fc1 of layer 1 is missing; the model has 2 layers"),
        (Sizes(96, 200, (32, 32, 32)), "a predictor for layer 2, but the model has 2 layers"),
        (Sizes(97, 200, (32, 32)), r"are \[32, 97\] and \[200, 32\], but the model needs \[r, 96\] and \[200, r\]"),
        (Sizes(96, 199, (32, 32)), r"but the model needs \[r, 96\] and \[200, r\]"),
    ],
)
def test_predictors_of_another_model(tmp_path: Path, tiny_model: Path, sizes: Sizes, says: str) -> None:
    write_gguf(tmp_path / "a.gguf", random_predictors(sizes, 7))
    with pytest.raises(UsageError, match=says):
        import_predictors(find_source(tmp_path), tiny_model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_sizes_that_show_after_reading(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in a process of its own, which would import torch for each.
    monkeypatch.setattr("picompile.predictors.powerinfer.importer.read_guarded", _read_here)
    (tmp_path / "in").mkdir()
    write_folder(tmp_path / "in", random_predictors(Sizes(96, 201, (32, 8)), 7))
    with pytest.raises(
        UsageError, match=r"are \[32, 96\] and \[201, 32\], but the model needs \[r, 96\] and \[200, r\]"
    ):
        import_predictors(find_source(tmp_path / "in"), tiny_model, tmp_path / "out")
    write_folder(tmp_path / "in", random_predictors(SIZES, 7))
    for counts, says in (
        (199, r"activation_1\.pt has 199 neurons; the model's have 200"),
        (0, r"activation_1\.pt is missing, and others are there; the model has 2 layers"),
    ):
        write_activations(tmp_path / "in", [torch.ones(200), torch.ones(counts)][: 1 + (counts > 0)])
        if not counts:
            (tmp_path / "in" / "activation_1.pt").unlink()
        with pytest.raises(UsageError, match=says):
            import_predictors(find_source(tmp_path / "in"), tiny_model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _read_here(source: PredictorSource, folder: Path) -> Path:
    files, activations = (
        {str(layer): str(file) for layer, file in found.items()} for found in (source.files, source.activations)
    )
    write_tensors(folder / "tensors", read_files(files) | read_activations(activations))
    return folder / "tensors"


class _Hostile:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.touched}",)


def test_hostile_torch_files(tmp_path: Path) -> None:
    fc1, fc2 = (torch.from_numpy(values) for values in random_predictors(SIZES, 9)[1])
    hostile, file = _Hostile(tmp_path / "touched"), tmp_path / "model_1.pt"
    contents: list[tuple[object, str]] = [
        (hostile, r"weights_only=True\) refuses it"),
        ({"fc1.weight": hostile, "fc2.weight": fc2}, r"weights_only=True\) refuses it"),
        (
            {"fc1.weight": fc1, "fc2.weight": fc2, "fc2.bias": fc2[:, 0]},
            r"model_1\.pt holds fc1.weight, fc2.weight, fc2",
        ),
        ([fc1, fc2], "holds a list, not fc1"),
        ({"fc1.weight": fc1, "fc2.weight": torch.ones(1, 1).expand(200, 10**9)}, "which is not what its file has"),
        ({"fc1.weight": fc1, "fc2.weight": fc2 * float("nan")}, "fc2.weight .* holds values that are no num"),
        ({"fc1.weight": fc1 * 1e6, "fc2.weight": fc2}, "too large for f16"),
        ({"fc1.weight": [1.0], "fc2.weight": fc2}, r"fc1.weight of model_1\.pt is no tensor"),
        ({"fc1.weight": fc1.to_sparse(), "fc2.weight": fc2}, "no tensor of numbers"),
    ]
    for content, says in contents:
        torch.save(content, file)
        with pytest.raises(RefusedError, match=says):
            read_files({"1": str(file)})
    assert not (tmp_path / "touched").exists()


@pytest.mark.slow("reads random damage in processes; single faults have fast tests")
def test_a_hostile_torch_file_end_to_end(tmp_path: Path, tiny_model: Path) -> None:
    write_folder(tmp_path / "in", random_predictors(SIZES, 9))
    torch.save(_Hostile(tmp_path / "touched"), tmp_path / "in" / "model_1.pt")
    with pytest.raises(UsageError) as caught:
        import_predictors(find_source(tmp_path / "in"), tiny_model, tmp_path / "out")
    assert "model_1.pt: torch.load(weights_only=True) refuses it" in str(caught.value)
    assert str(caught.value).isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow("starts a process, which imports torch")
def test_a_full_disk(tmp_path: Path) -> None:
    """Where there is no space for the tensors, there is none for the reason either."""
    write_folder(tmp_path / "in", random_predictors(SIZES, 15))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".tensors.safetensors.tmp").symlink_to("/dev/full")
    (tmp_path / "folder" / "refusal.txt").mkdir()
    with pytest.raises(DoesNotFitError, match="no space left"):
        read_guarded(find_source(tmp_path / "in"), tmp_path / "folder")


def test_places_that_safetensors_cannot_write(tmp_path: Path, tiny_model: Path) -> None:
    write_gguf(tmp_path / "a.gguf", random_predictors(SIZES, 16))
    with pytest.raises(UsageError, match="not a name in UTF-8"):
        import_predictors(find_source(tmp_path / "a.gguf"), tiny_model, tmp_path / os.fsdecode(b"\xff"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.slow("waits for the limit of a process")
def test_limits_end_the_process(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", random_predictors(SIZES, 14))
    source, folder = find_source(tmp_path / "in"), tmp_path / "folder"
    limits = GuardLimits.of(source)
    folder.mkdir()
    for changed, says in (
        (replace(limits, wall_s=0.05), "took more than 0 s"),
        (replace(limits, memory_bytes=1 << 10), "more memory than its size explains|Cannot allocate memory"),
    ):
        with pytest.raises(UsageError, match=says):
            read_guarded(source, folder, changed)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@settings(max_examples=200)
@given(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32))
def test_computed_from_the_threshold_on(threshold: float, logit: float) -> None:
    """`logit > computes_above(t)` is `logit >= t`, but for what f16 cannot tell from zero."""
    above = computes_above(threshold)
    for value in (logit, threshold):
        wanted = value >= threshold
        assert (np.float32(value) > np.float32(above)) == wanted or (threshold == 0 and -(2.0**-24) < value < 0)
    assert np.float16(0) > np.float16(computes_above(0.0))
