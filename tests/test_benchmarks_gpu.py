"""benchmarks/gpu_pack.py and gpu.py, on the stand-in for the GPU: whether they are right, and nothing about speed."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from codegen.cuda.emulator import Emulated
from fake_cuda.fixtures import fake_cuda, fake_library
from support import ROOT, BuildOnce

from picompile.targets import native_target
from picompile_passes.dialect import FORMATS, dequantize_rows, quantize_rows

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu_kernels  # noqa: E402
from _gpu_cases import Case, attention, ffn, pack_kernels  # noqa: E402
from _gpu_copied import CopiedDecoder, Layers  # noqa: E402
from _gpu_engines import Settings, measure_model  # noqa: E402
from _gpu_formats import pack, row_bytes, unpack  # noqa: E402
from _gpu_kernels import check, images_of, measure  # noqa: E402
from _gpu_models import ModelOptions, pack_model, write_index  # noqa: E402
from _gpu_report import STAND_IN, bars, text_of  # noqa: E402
from _gpu_weights import Firing  # noqa: E402

from picompile.synth.shapes import shape_from_config  # noqa: E402

__all__ = ["fake_cuda", "fake_library"]

BUDGET = 0.7
SHAPE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "relu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CASES = [
    Case("linear", "linear", {"format": "q4", "n": 35, "k": 72, "rows": 1, "bias": True}),
    Case("ffn", "ffn", ffn("f16", "masked", 77, 40), shares=(0.3,)),
    Case("attention", "attention", attention(20, "float16", heads=(4, 2, 16))),
    Case("send mask", "send_mask", {"dim": 33, "neurons": 77, "columns": 55, "rows": 3}),
    Case("norm", "rms_norm", {"dim": 100, "rows": 3, "eps": 1e-5}),
    Case("leading", "leading_logits", {"vocab": 2100, "rows": 3}),
]
# On the side of the GPU there are these and nothing of picompile but its runtime.
THERE = {"picompile_runtime", "numpy", "torch", *sys.stdlib_module_names}
OF_THE_PACK = ("_gpu_cases", "_gpu_models")
DEFINITION = re.compile(
    r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\([^)]*\) \{\n.*?\n\}\n', re.DOTALL
)


def _pack(folder: Path) -> None:
    """A pack as gpu_pack.py writes it, of a few small kernels and a model of one layer."""
    folder.mkdir()
    kernels = pack_kernels(CASES, folder / "small" / "kernels", 90)
    shape, options = shape_from_config("tiny", SHAPE), ModelOptions("f16", BUDGET, 32, 40, 90, native_target().isas[:1])
    entries = {variant: pack_model(shape, options, variant, folder) for variant in ("hybrid", "cpu")}
    group = {"folder": "small", "cases": kernels}
    index = {"schema": 1, "sm": 90, "kernels": [group], "checks": [entries["hybrid"]], "models": [entries["cpu"]]}
    write_index(folder, index)
    Emulated(_sources(folder), folder / "emulated.so")


def _sources(folder: Path) -> str:
    """All kernels of a pack in one source: the stand-in takes one library."""
    text = (folder / "small" / "device.cu").read_text()
    known = {match[1] for match in DEFINITION.finditer(text)}
    with zipfile.ZipFile(folder / "tiny.f16.hybrid.zip") as archive:
        of_model = archive.read("device.cu").decode()
    return text + "".join(match[0] for match in DEFINITION.finditer(of_model) if match[1] not in known)


@pytest.fixture(scope="session")
def gpu_pack(build_once: BuildOnce) -> Path:
    return build_once("gpu-pack", _pack)


@pytest.fixture
def kernels(gpu_pack: Path, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The cases of the pack by label, with the stand-in in the place of the driver."""
    for name, value in _stand_in(gpu_pack).items():
        monkeypatch.setenv(name, value)
    return {case["label"]: case for case in _index(gpu_pack)["kernels"][0]["cases"]}


def _stand_in(gpu_pack: Path) -> dict[str, str]:
    return {"FAKE_CUDA_KERNELS": str(gpu_pack / "emulated.so"), "FAKE_CUDA_SM": "90", "FAKE_CUDA_VERSION": "12080"}


def _index(gpu_pack: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((gpu_pack / "pack.json").read_text())
    return content


@pytest.mark.parametrize("form", ["f16", "q8", "q4"])
@pytest.mark.parametrize("columns", [31, 96, 420])
def test_formats_are_those_of_the_compiler(form: str, columns: int) -> None:
    weights = np.random.default_rng(columns).standard_normal((7, columns), np.float32)
    weights[3] = 0
    packed, expected = pack(weights, form), quantize_rows(torch.from_numpy(weights), form)
    assert row_bytes(form, columns) == FORMATS[form].row_bytes(columns)
    assert np.array_equal(packed, expected.numpy())
    assert np.array_equal(unpack(packed, form, columns), dequantize_rows(expected, form, columns).numpy())


def test_what_runs_on_the_gpu_imports_no_compiler() -> None:
    files = [path for path in BENCHMARKS.glob("*gpu*.py") if path.stem not in (*OF_THE_PACK, "gpu_pack")]
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            assert all(root in THERE or (root.startswith("_gpu") and root not in OF_THE_PACK) for root in roots), path


def test_all_of_a_pack_is_right_and_nothing_is_timed(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", gpu_pack, "--device-library", fake_library, "--json", output]
    ended = subprocess.run(
        command, env=os.environ | _stand_in(gpu_pack), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(STAND_IN)
    assert "not measured" in ended.stdout.splitlines()[-1]
    results = json.loads(output.read_text())
    assert results["stand_in"] and not results["models"] and results["copy_bytes_per_s"] is None
    assert [row["label"] for row in results["kernels"]] == [case.label for case in CASES]
    assert all(row["is_right"] and "seconds" not in row for row in results["kernels"])
    # Float32 against float64: the few roundings of sums of up to a hundred products.
    assert all(row["error"] < 1e-6 for row in results["kernels"])
    (model,) = results["checks"]
    # Of the cache's float16, and of float32.
    assert model["is_right"] and model["error"] < 1e-4
    assert model["computed"]["hot"] > 2 * model["computed"]["cold"] > 0


def test_a_wrong_kernel_is_found(gpu_pack: Path, kernels: dict[str, dict[str, Any]]) -> None:
    """As if it had been compiled with other parameters."""
    images, case = images_of(gpu_pack / "small" / "kernels"), kernels["norm"]
    other = case | {"parameters": case["parameters"] | {"eps": 1e-3}}
    assert [check(images, each, "cpu")[0]["is_right"] for each in (case, other)] == [True, False]


@pytest.mark.parametrize(("value", "is_right"), [(1.0, True), (1.0 + 5e-4, True), (1.0 + 2e-3, False), (np.nan, False)])
def test_errors(value: float, is_right: bool) -> None:
    found = np.full((3, 4), -1, np.int32).view(np.float32)
    found[:2] = 1
    found[1, 3] = value
    assert (_gpu_kernels._error(found, np.ones((2, 4))) <= _gpu_kernels.LIMIT) == is_right
    assert not _gpu_kernels._is_stray(found, np.ones((2, 4)))
    found[2, 0] = 0
    assert _gpu_kernels._is_stray(found, np.ones((2, 4)))


def test_measuring(gpu_pack: Path, kernels: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that happens around a time; the time itself says nothing here."""
    for name, small in (("_WORKING_SET_BYTES", 2**15), ("_MOST_LAUNCHES", 3), ("_GRAPHS", 1)):
        monkeypatch.setattr(_gpu_kernels, name, small)
    (row,) = measure(images_of(gpu_pack / "small" / "kernels"), kernels["ffn"], "cpu", copy_bytes_per_s=1e9)
    # 30 % of 77 neurons, three rows of 40 float16 in 128 bytes, and the mask.
    assert row["is_right"] and row["moved_bytes"] == 23 * 3 * 128 + 77
    assert row["seconds"] > 0 and row["copy_share"] == pytest.approx(row["moved_bytes"] / row["seconds"] / 1e9)


def test_speed_of_a_model(gpu_pack: Path, tmp_path: Path) -> None:
    (entry,) = _index(gpu_pack)["models"]
    settings = Settings(gpu_pack, tmp_path, active=0.2, threads=1, prompt=3, tokens=20, repeats=1)
    row = measure_model(settings, entry, skew=True)
    assert row["tokens_per_s"] > 0 and row["is_finite"]
    # The mean of 384 neurons and 20 tokens.
    assert 0.14 < row["computed"]["all"] < 0.26
    assert not list(tmp_path.iterdir())


def test_the_hybrid_model_keeps_to_its_budget(gpu_pack: Path) -> None:
    (entry,) = _index(gpu_pack)["checks"]
    assert 0 < entry["hot"] < SHAPE["intermediate_size"]
    # Tables of neurons and angles are beside it.
    assert entry["gpu_bytes"] < BUDGET * entry["dense_bytes"] + 2**14


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("hot", [0, 100, 1000])
def test_rates_of_neurons(skew: bool, hot: int) -> None:
    firing = Firing(active=0.05, skew=skew, neurons=1000)
    of_hot, of_cold = firing.rates(hot)
    share = hot / 1000
    assert share * of_hot + (1 - share) * of_cold == pytest.approx(0.05)
    assert (of_hot > of_cold) == (skew and hot == 100)
    named = np.random.default_rng(hot).standard_normal((500, 1000)) + firing.biases(hot) > 0
    assert named.mean() == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize("computes", [True, False])
def test_copied_layers(computes: bool) -> None:
    shape = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 4, "vocab": 50}
    elements = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    decoder = CopiedDecoder(Layers(shape, 4, 1, 2 * elements, computes), depth=5, device="cpu")
    for _ in range(3):
        y = decoder.step()
    assert y.shape == ((1, 50) if computes else (1, 64)) and torch.isfinite(y).all()
    # Two buffers are ahead.
    assert decoder._next == 3 * 3 + 2


def test_bars() -> None:
    model = {"model": "m", "quant": "q4", "gpu_bytes": 1, "hot": 64, "resident_layers": 1}
    results: dict[str, Any] = {
        "stand_in": False,
        "machine": {"gpu": "G", "driver": "13.0", "torch": "2"},
        "copy_bytes_per_s": 3e12,
        "kernels": [
            {"label": "ffn masked 28672x8192 q4", "share": 0.1, "error": 1e-6, "is_right": True, "copy_share": 0.69},
            {"label": "ffn masked 4096x4096 f16", "share": 0.5, "error": 2e-3, "is_right": False, "seconds": 2e-5},
        ],
        "cublas": {"gated": 3e-5},
        "checks": [],
        "models": [
            {**model, "variant": "hybrid", "skew": True, "tokens_per_s": 60.0, "overlap_share": 0.85},
            {**model, "variant": "layers_dense", "skew": True, "tokens_per_s": 10.0},
            {**model, "variant": "copied", "tokens_per_s": 12.5, "computes": False},
            {**model, "variant": "gpu", "skew": True, "reason": "does not fit"},
        ],
    }
    verdicts = {bar.what: (bar.found, bar.is_met) for bar in bars(results)}
    assert verdicts["ffn masked 28672x8192 q4, 10 % firing"] == ("69%", False)
    assert verdicts["ffn masked 28672x8192 f16, 10 % firing"] == (None, None)
    assert verdicts["ffn masked 4096x4096 f16, 50 % firing, against cuBLAS"] == ("1.50 ×", True)
    assert verdicts["kernels equal eager PyTorch"][1] is False
    assert verdicts["whole models equal eager PyTorch"][1] is None
    # Against the faster of the two.
    assert verdicts["m q4: hybrid against dense layer offloading"] == ("4.8 ×", False)
    assert verdicts["m q4: overlap of the shorter side"] == ("85%", True)
    assert "does not fit" in text_of(results)
