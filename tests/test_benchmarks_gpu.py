"""benchmarks/gpu_pack.py and gpu.py, on the stand-in for the GPU: whether they are right, and nothing about speed."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from codegen.cuda.emulator import Emulated
from fake_cuda.fixtures import fake_cuda, fake_library
from support import ROOT, BuildOnce

from picompile.targets import native_target

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu_dense  # noqa: E402
import _gpu_engines  # noqa: E402
import _gpu_kernels  # noqa: E402
import _gpu_models  # noqa: E402
import _gpu_units  # noqa: E402
from _gpu_cases import Case, attention, ffn, pack_kernels  # noqa: E402
from _gpu_dense import CopiedDecoder  # noqa: E402
from _gpu_engines import compare_logits, made, measure_model, overlaps  # noqa: E402
from _gpu_kernels import copy_bandwidth, images_of, run_case  # noqa: E402
from _gpu_models import ModelOptions, pack_model  # noqa: E402
from _gpu_report import STAND_IN, bars, empty_results, merged, text_of  # noqa: E402
from _gpu_units import Unit, run  # noqa: E402
from _gpu_weights import Firing  # noqa: E402

from picompile.synth.shapes import shape_from_config  # noqa: E402
from picompile_codegen.lower import LowerOptions, lower  # noqa: E402
from picompile_runtime import open_artifact  # noqa: E402
from picompile_runtime.places import weights_of  # noqa: E402

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
# On the side of the GPU there are these and nothing of picompile but its runtime, and of its passes the dialect.
THERE = {"picompile_runtime", "picompile_passes.dialect", "numpy", "torch", *sys.stdlib_module_names}
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
    index = {"schema": 2, "sm": 90, "kernels": [group], "checks": [entries["hybrid"]], "models": [entries["cpu"]]}
    (folder / "pack.json").write_text(json.dumps(index))
    Emulated(_sources(folder), folder / "emulated.so")


def _sources(folder: Path) -> str:
    """All kernels of a pack in one source: the stand-in takes one library."""
    text = (folder / "small" / "device.cu").read_text()
    known = {match[1] for match in DEFINITION.finditer(text)}
    with zipfile.ZipFile(folder / "tiny.f16.hybrid.zip") as archive:
        of_model = archive.read("kernels/device.cu").decode()
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


def test_what_runs_on_the_gpu_imports_no_compiler() -> None:
    files = [path for path in BENCHMARKS.glob("*gpu*.py") if path.stem not in (*OF_THE_PACK, "gpu_pack")]
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                starts = {name.partition(".")[0], ".".join(name.split(".")[:2])}
                assert starts & THERE or (name.startswith("_gpu") and name not in OF_THE_PACK), (path, name)


def _command(gpu_pack: Path, fake_library: Path, folder: Path) -> list[Any]:
    options = ["--device-library", fake_library, "--json", folder / "out.json", "--work", folder]
    return [sys.executable, BENCHMARKS / "gpu.py", gpu_pack, *options]


def test_all_of_a_pack_is_right_and_nothing_is_timed(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    command, variables = _command(gpu_pack, fake_library, tmp_path), os.environ | _stand_in(gpu_pack)
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(STAND_IN)
    assert "not measured" in ended.stdout.splitlines()[-1]
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["stand_in"] and not results["models"] and not results["failed"] and "copy_bytes_per_s" not in results
    assert [row["label"] for row in results["kernels"]] == [case.label for case in CASES]
    assert all(row["is_right"] and "seconds" not in row for row in results["kernels"])
    # Float32 against float64: the few roundings of sums of up to a hundred products.
    assert all(row["error"] < 1e-6 for row in results["kernels"])
    (model,) = results["checks"]
    # Of the cache's float16, and of float32.
    assert model["is_right"] and model["error"] < 1e-4
    assert model["tokens"]["same"] == model["tokens"]["decided"] > 10
    assert model["computed"]["hot"] > 2 * model["computed"]["cold"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_what_is_ended_shows_what_it_knew(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    command, variables = _command(gpu_pack, fake_library, tmp_path), os.environ | _stand_in(gpu_pack)
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout and process.stderr
        assert any("right yes" in line for line in process.stderr)
        process.terminate()
        text = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["kernels"][0]["is_right"] and results["checks"][0]["reason"] == "was not come to"
    assert "whole models equal eager PyTorch | within 1e-3 |  | not measured" in text


def _units(gpu_pack: Path, labels: list[str]) -> list[Unit]:
    """Kernels; those that the pack does not have are of a folder that is not there."""
    cases = {case["label"]: case | {"folder": "small"} for case in _index(gpu_pack)["kernels"][0]["cases"]}
    return [Unit("kernel", "kernels", cases.get(label, {"folder": "none"}), {"label": label}) for label in labels]


def _rows(gpu_pack: Path, library: Path, labels: list[str], seconds: float = 600.0) -> list[tuple[str, Any, str]]:
    options, deadline_s = Namespace(pack=gpu_pack, device_library=str(library)), time.monotonic() + seconds
    found = [row for _, row in run(_units(gpu_pack, labels), options, deadline_s) if row is not None]
    return [(row["label"], row["is_right"], row.get("reason", "").partition(":")[0]) for row in found]


def test_one_that_fails_does_not_take_others_with_it(
    gpu_pack: Path, kernels: dict[str, dict[str, Any]], fake_library: Path
) -> None:
    expected = [("norm", True, ""), ("other", False, "FileNotFoundError"), ("leading", True, "")]
    assert _rows(gpu_pack, fake_library, ["norm", "other", "leading"]) == expected


def test_processes_that_crash_or_hang(gpu_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"abort": tmp_path / "abort.so", "pause": tmp_path / "pause.so"}
    for name, path in libraries.items():
        source = (
            f"#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void f() {{ {name}(); }}"
        )
        subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=source, text=True, check=True)
    ended = f"the process ended with -{signal.SIGABRT.value}"
    assert _rows(gpu_pack, libraries["abort"], ["norm", "leading"]) == [
        ("norm", False, ended),
        ("leading", False, ended),
    ]
    # Those that have no time left say nothing.
    assert _rows(gpu_pack, libraries["pause"], ["norm", "leading"], seconds=0.5) == []
    monkeypatch.setattr(_gpu_units, "_START_S", -59.5)
    late = "nothing came within 0 s"
    assert _rows(gpu_pack, libraries["pause"], ["norm"]) == [("norm", False, late)]


def test_a_wrong_kernel_is_found(gpu_pack: Path, kernels: dict[str, dict[str, Any]]) -> None:
    """As if it had been compiled with other parameters."""
    images, case = images_of(gpu_pack / "small" / "kernels"), kernels["norm"]
    other = case | {"parameters": case["parameters"] | {"eps": 1e-3}, "speed": True}
    ((right,), (wrong,)) = (list(run_case(images, each, "cpu")) for each in (case, other))
    assert right["is_right"] and not wrong["is_right"] and "seconds" not in wrong


@pytest.mark.parametrize(("value", "is_right"), [(1.0, True), (1.0 + 5e-4, True), (1.0 + 2e-3, False), (np.nan, False)])
def test_errors(value: float, is_right: bool) -> None:
    found = np.full((3, 4), -1, np.int32).view(np.float32)
    found[:2] = 1
    found[1, 3] = value
    assert (_gpu_kernels._error(found, np.ones((2, 4))) <= _gpu_kernels.LIMIT) == is_right
    assert not _gpu_kernels._is_stray(found, np.ones((2, 4)))
    found[2, 0] = 0
    assert _gpu_kernels._is_stray(found, np.ones((2, 4)))


@pytest.mark.parametrize(
    ("dtype", "change", "is_right"),
    [(np.int8, 0, True), (np.int8, 1, True), (np.int8, -2, False), (np.uint8, 1, False), (np.int64, 1, False)],
)
def test_errors_of_integers(dtype: Any, change: int, is_right: bool) -> None:
    expected = np.arange(100, dtype=dtype)
    found = expected.copy()
    found[50] += change
    assert (_gpu_kernels._error(found, expected) <= _gpu_kernels.LIMIT) == is_right


def test_measuring(gpu_pack: Path, kernels: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that happens around a time; the time itself says nothing here."""
    small = {"_WORKING_SET_BYTES": 2**15, "_MOST_LAUNCHES": 3, "_GRAPHS": 1, "_WARM_UP_S": 0.0, "_COPY_BYTES": 2**24}
    for name, value in small.items():
        monkeypatch.setattr(_gpu_kernels, name, value)
    images = images_of(gpu_pack / "small" / "kernels")
    (row,) = run_case(images, kernels["ffn"] | {"speed": True}, "cpu")
    # 30 % of 77 neurons, three rows of 40 float16 in 128 bytes, and the mask.
    assert row["is_right"] and row["moved_bytes"] == 23 * 3 * 128 + 77
    assert row["seconds"] > 0 and copy_bandwidth(images) > 0


@pytest.mark.parametrize("part", ["models", "checks"])
def test_speed_of_a_model(
    part: str,
    gpu_pack: Path,
    kernels: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All on the CPU, and split over both devices."""
    (entry,) = _index(gpu_pack)[part]
    monkeypatch.setattr(_gpu_engines, "_COUNTED", 10)
    row = measure_model(gpu_pack, tmp_path / "work", entry, 1, {"active": 0.2, "skew": True}, (3, 20, 1))
    assert row["tokens_per_s"] > 0 and row["is_right"] and row["taken_bytes"] is None
    # The mean of 384 neurons and 20 tokens.
    assert 0.14 < row["computed"]["all"] < 0.26
    assert row["computed"]["all"] == row["bench"]["decode"]["computed_share"]
    assert (row["overlap"] is None) == (part == "models")
    assert not list(tmp_path.iterdir())


def test_tokens_are_compared_where_the_margin_decides() -> None:
    right = np.array([[1.0, 0.5, 0.0], [1.0, 0.9999, 0.0], [0.0, 0.5, 1.0]])
    found = right + np.array([[0.0005, 0, 0], [0, 0.0005, 0], [0, 0, 0]])
    error, same, decided = compare_logits(found, right, 1e-3)
    assert (error, same, decided) == (pytest.approx(5e-4), 2, 2)
    assert compare_logits(found[:, ::-1], right, 1e-3)[1:] == (0, 2)
    assert compare_logits(np.full_like(right, np.nan), right, 1e-3)[0] == np.inf


@pytest.mark.parametrize(("step_s", "expected"), [(0.010, 1.0), (0.012, 0.5), (0.014, 0.0), (0.020, 0.0)])
def test_overlap_of_steps_that_are_not_stamped(step_s: float, expected: float) -> None:
    hybrid = {"host_s_per_token": 0.010, "device_s_per_token": 0.004, "overlap_share": 0.9}
    found = overlaps({"hybrid": hybrid, "decode": {"tokens_per_s": 1 / step_s}})
    assert found == [0.9, pytest.approx(expected)]


def test_the_hybrid_model_keeps_to_its_budget(gpu_pack: Path, tmp_path: Path) -> None:
    (entry,) = _index(gpu_pack)["checks"]
    assert 0 < entry["hot"] < SHAPE["intermediate_size"]
    with made(gpu_pack / entry["file"], tmp_path / "work", active=0.2, skew=True) as folder:
        artifact = open_artifact(folder)
        names = set(weights_of(artifact.program, "device")) - artifact.program.streamed
        weights = sum(artifact.tensors[name].size_bytes for name in names)
        artifact.close()
    # Tables of neurons and angles are beside it.
    assert weights < BUDGET * entry["dense_bytes"] + 2**14


def test_kernels_of_both_devices_may_have_one_name() -> None:
    """As where whole layers are on one device or the other; in q4 their arguments are not the same."""
    shape, options = shape_from_config("two", SHAPE | {"num_hidden_layers": 2}), ModelOptions("q4", 0.7, 32, 40, 90, ())
    sizes = _gpu_models._sizes(shape, options)
    split = _gpu_models._split(sizes, int(0.7 * sizes.dense), "layers")
    assert sorted(split.hot.values()) == [0, 384]
    graph = _gpu_models._graph(shape, options, split, dense=False)
    lowered = lower(graph, LowerOptions(40, 64, "float16", 1, "cuda", split.placement))
    assert {each.name for each in lowered.built.values()} & {each.name for each in lowered.device_built.values()}
    uses = _gpu_models._uses(lowered)
    assert uses.keys() == lowered.weights.tensors.keys()
    assert {use["columns"] for use in uses.values() if use["parameter"] == "neuron_w"} == {64}


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


@pytest.mark.parametrize("quant", ["f16", "q4"])
def test_copied_layers(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 4, "vocab": 50}
    elements = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    entry = {"shape": shape, "quant": quant, "layer_bytes": 2 * elements, "resident_layers": 1, "context": 10}
    monkeypatch.setattr(_gpu_dense, "_DEVICE", "cpu")
    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    decoder = CopiedDecoder(entry)
    for _ in range(3):
        y = decoder.step()
    assert y.shape == ((1, 50) if quant == "f16" else (1, 64)) and torch.isfinite(y).all()
    # Two buffers are ahead.
    assert decoder._next == 3 * 3 + 2 and decoder.missing_bytes == 3 * 2 * elements


MODEL = {"model": "m", "quant": "q4", "budget": 0.5, "dense_bytes": 100, "hot": 64, "resident_layers": 1, "skew": True}


def _results() -> dict[str, Any]:
    """All bars about models are reached but one."""
    speed = {"folder": "speed", "error": 1e-6, "is_right": True, "moved_bytes": 10**8}
    gated = "ffn masked 4096x4096 f16"
    hybrid = {"tokens_per_s": 60.0, "overlap": [0.9, 0.85], "computed": {"all": 0.052}, "taken_bytes": 49}
    rows = [("hybrid", hybrid), ("layers_dense", {"tokens_per_s": 10.0}), ("layers", {"tokens_per_s": 20.0})]
    rows += [("copied", {"tokens_per_s": 12.5, "computes": False})]
    return empty_results(2, False) | {
        "machine": {"gpu": "G", "driver": "13.0", "torch": "2"},
        "copy_bytes_per_s": 3e12,
        "cublas_gated_s": 3e-5,
        "kernels": [
            speed | {"label": "ffn masked 28672x8192 q4", "share": 0.1, "seconds": 10**8 / 3e12 / 0.69},
            speed | {"label": gated, "share": 0.7, "seconds": 4e-5},
            speed | {"label": gated, "share": 0.5, "seconds": 2e-5},
            speed | {"label": gated, "share": 0.3, "seconds": 2.5e-5},
        ],
        "models": [MODEL | {"is_right": True, "variant": variant} | row for variant, row in rows],
    }


def _verdicts(results: dict[str, Any]) -> dict[str, tuple[str, bool | None]]:
    return {what: (found, is_met) for what, _, found, is_met in bars(results)}


FIVE = "m q4: hybrid against dense layer offloading, 5.2% computed"
OVERLAP, BUDGET_BAR = "m q4: overlap of the shorter side", "m q4: the budget as a multiple of the GPU's memory in use"
CUBLAS = "ffn masked 4096x4096 f16, 50 % firing and less, against cuBLAS"


def test_bars() -> None:
    results = _results()
    verdicts = _verdicts(results)
    assert verdicts["ffn masked 28672x8192 q4, 10 % firing"] == ("69%", False)
    assert verdicts["ffn masked 28672x8192 f16, 10 % firing"] == ("", None)
    # The worst of the shares from 50 % down.
    assert verdicts[CUBLAS] == ("1.20 ×", True)
    assert verdicts["kernels equal eager PyTorch"][1] is True
    assert verdicts["whole models equal eager PyTorch"][1] is verdicts["whole models give the same tokens"][1] is None
    # Against the faster of the two.
    assert (verdicts[FIVE], verdicts[OVERLAP], verdicts[BUDGET_BAR]) == (
        ("4.8 ×", False),
        ("85%", True),
        ("1.02", True),
    )
    assert verdicts["m q4: dense; + predictors and operators; + engine; + policy"][1] is None
    results["models"].append(results["models"][0] | {"skew": False, "tokens_per_s": 20.0})
    ablation = _verdicts(results)["m q4: dense; + predictors and operators; + engine; + policy"]
    assert ablation == ("10.00 → 20.00 → 20.00 → 60.00 tokens/s", False)
    assert "all on the CPU" not in text_of(results)
    for row in results["models"]:
        row["hot"] = 0
    ablation = _verdicts(results)["m q4: dense; + predictors and operators; + engine; + policy"]
    assert ablation == ("10.00 → 20.00 → 60.00 tokens/s", True)


def test_bars_that_are_not_decided() -> None:
    results = _results()
    results["models"][0]["computed"] = {"all": 0.11}
    assert _verdicts(results)[FIVE.replace("5.2", "11.0")] == ("", None)
    results = _results()
    results["models"][1] |= {"is_right": None, "reason": "was not come to"}
    del results["models"][1]["tokens_per_s"]
    assert _verdicts(results)[FIVE] == ("", None)
    results["kernels"].append(
        {"label": CUBLAS.partition(",")[0], "folder": "speed", "is_right": None, "reason": "late"}
    )
    verdicts = _verdicts(results)
    assert verdicts[CUBLAS] == ("", None) and verdicts["kernels equal eager PyTorch"][1] is None
    assert "was not come to" in text_of(results) and "late" in text_of(results)


def test_what_is_wrong_reaches_no_bar() -> None:
    results = _results()
    for row in (results["models"][0], results["kernels"][2]):
        row["is_right"] = False
    verdicts = _verdicts(results)
    assert [verdicts[name] for name in (FIVE, OVERLAP, CUBLAS)] == [("wrong", False)] * 3
    assert verdicts["kernels equal eager PyTorch"] == (
        f"4, the worst 1.0e-06 (ffn masked 28672x8192 q4); wrong: {CUBLAS.partition(',')[0]}",
        False,
    )


def test_runs_become_one() -> None:
    first, second = _results(), _results()
    for row in first["models"]:
        row |= {"is_right": None, "reason": "was not come to"}
    second["kernels"] = []
    both = merged([first, second])
    assert both["kernels"] == first["kernels"] and both["models"] == second["models"]
    assert both["copy_bytes_per_s"] == 3e12
