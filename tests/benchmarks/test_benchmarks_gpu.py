"""benchmarks/gpu_pack.py and gpu.py, on the stand-in for the GPU: whether they are right, and nothing about speed."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.gpu_packs import (
    BENCHMARKS,
    CASES,
    TIMED,
    command,
    fake_cuda,
    fake_library,
    gpu_pack,
    index_of,
    kernels,
    ran,
    stand_in,
)
from helpers.support import ROOT

sys.path.insert(0, str(BENCHMARKS))

import _gpu_order
import gpu_pack as pack_script
from _gpu_report import STAND_IN

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]

DOCUMENT = ROOT / "docs" / "gpu_first_run.md"
# On the side of the GPU there are these and nothing of picompile but its runtime, and of its passes the dialect.
THERE = {
    "picompile_runtime",
    "picompile_passes.dialect",
    "picompile_passes.weight_formats",
    "numpy",
    "torch",
    *sys.stdlib_module_names,
}
OF_THE_PACK = ("_gpu_cases", "_gpu_models", "_gpu_split", "_gpu_pack_bundled")


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


def test_the_parent_imports_no_pytorch() -> None:
    """It has the results, and must not fail; and PyTorch takes seconds."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _documented() -> list[list[str]]:
    """The options of the commands for the machine with the GPU."""
    found = re.findall(r"^    python benchmarks/gpu\.py build/gpu (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    return [shlex.split(options) for options in found]


def test_the_first_documented_command(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    """Correctness, and the speed of kernels."""
    ended, results = ran(gpu_pack, fake_library, tmp_path, *_without_files(_documented()[0]))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(STAND_IN)
    assert "not measured" in ended.stdout.splitlines()[-1]
    assert results["stand_in"] and not results["models"] and not results["failed"]
    assert results["ping_pong"]["rounds"] == 100 and results["ping_pong"]["p99_s"] >= results["ping_pong"]["p50_s"] > 0
    assert results["start_s"].keys() == {"2", "5"} and all(results["start_s"].values())
    assert "a graph of 5 launches behind one that waits for the host is started in" in ended.stdout
    assert results["copy_bytes_per_s"] > 0 and results["host_bytes_per_s"].keys() == {"1"}
    small, timed = results["kernels"][: len(CASES)], results["kernels"][len(CASES) :]
    assert [row["label"] for row in small] == [case.label for case in CASES]
    assert [row["label"] for row in timed] == [case.label for case in TIMED for _ in range(2)]
    assert not any("seconds" in row for row in small) and all(row["seconds"] > 0 for row in timed)
    # Float32 against float64: the few roundings of sums of up to a hundred products; several tokens are multiplied as
    # halves.
    in_halves = {case.label for case in (*CASES, *TIMED) if "format" in case.parameters and case.parameters["rows"] > 1}
    assert in_halves
    for row in results["kernels"]:
        assert row["is_right"] and row["error"] < (5e-4 if row["label"] in in_halves else 1e-6)
    model, bundled = results["checks"]
    # Of the cache's float16, and of float32.
    assert model["is_right"] and model["error"] < 1e-4
    assert model["tokens"]["same"] == model["tokens"]["decided"] > 10
    assert model["computed"]["hot"] > 2 * model["computed"]["cold"] > 0
    assert bundled["is_right"] and bundled["tokens"]["rows"] == 8 and bundled["agreed"] == [4, 4]
    assert bundled["tokens_per_s"] > 0 and bundled["step"]["gpu_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_second_documented_command(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    """Models, what is planned included; copies need a GPU of PyTorch's."""
    ended, results = ran(gpu_pack, fake_library, tmp_path, *_without_files(_documented()[1]))
    assert ended.returncode == 0, ended.stderr
    assert not results["kernels"] and not results["checks"] and not results["failed"]
    # The file of weights, and more beside it.
    assert results["touched"]["bytes"] > max(entry["weight_bytes"] for entry in index_of(gpu_pack)["models"])
    found = {(row["variant"], row["skew"]): row for row in results["models"]}
    expected = [("hybrid", True), ("layers_dense", True), ("copied", True), ("hybrid_4090", True), ("hybrid", False)]
    assert list(found) == [*expected, ("cpu", True)]
    assert found["copied", True]["reason"].startswith("DoesNotFitError: PyTorch sees no GPU")
    for variant, skew in (key for key in found if key[0] != "copied"):
        row = found[variant, skew]
        assert row["is_right"] and row["tokens_per_s"] > 0 and row["prompts"].keys() == {"5", "9"}
        assert row["active"] == (0.3 if variant == "hybrid_4090" else 0.05)
        assert (row["step"] is None) == (variant == "cpu")
    assert "memory of a 4090" in ended.stdout and STAND_IN in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def _without_files(options: list[str]) -> list[str]:
    """But for where results go, which the test says, and for models, which the pack has none of by that name."""
    return [each for each in options if not each.startswith("build/") and each not in ("--json", "--models")]


def test_one_kernel_alone(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    ended, results = ran(gpu_pack, fake_library, tmp_path, "--case", "timed ffn")
    assert ended.returncode == 0, ended.stderr
    assert [(row["label"], "seconds" in row) for row in results["kernels"]] == [("timed ffn", False)] * 2
    assert not results["checks"] and not results["models"] and "ping_pong" not in results
    unknown = command(gpu_pack, fake_library, tmp_path, "--case", "other")
    ended = subprocess.run(unknown, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "has no kernel 'other', but linear, ffn" in ended.stderr


def test_a_run_that_is_ended_leaves_its_results_so_far(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(gpu_pack, fake_library, tmp_path),
        env=os.environ | stand_in(gpu_pack),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout and process.stderr
        assert any("right yes" in line for line in process.stderr)
        process.terminate()
        text = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["kernels"][0]["is_right"] and results["checks"][0]["reason"] == "was not come to"
    assert "whole models equal eager PyTorch | within 1e-3 |  | not measured" in text


def test_models_that_the_bars_need_are_measured_first(gpu_pack: Path) -> None:
    """Models of 70 billion parameters, which need most, are first; and of each what the bars need."""
    assert pack_script.MODELS[0] == "llama-70b:q4"
    bars = [variant for variant, skew, _ in _gpu_order._VARIANTS if skew][:3]
    assert bars == ["hybrid", "layers_dense", "copied"]
    assert {
        f"{name}_{plan.target}" for plan in pack_script.PLANNED.values() for name in ("hybrid", "layers_dense")
    } <= {variant for variant, _, _ in _gpu_order._VARIANTS}


def test_threads_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((16, [8, 16]), (12, [8]), (2, [2])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert _gpu_order.default_threads() == expected
