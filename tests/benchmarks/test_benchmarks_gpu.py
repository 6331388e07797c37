"""benchmarks/gpu_pack.py and gpu.py, on the stand-in for the GPU: whether they are right, and nothing about speed."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

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

import _gpu_schedule
import gpu
import gpu_pack as pack_script
from _gpu_cases import small_cases, speed_cases
from _gpu_report import STAND_IN
from _gpu_sources import commit, sources_digest

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
OF_THE_PACK = ("_gpu_cases", "_gpu_models", "_gpu_split", "_gpu_pack_bundled", "gpu_pack")


def test_what_runs_on_the_gpu_imports_no_compiler() -> None:
    files = [path for path in BENCHMARKS.glob("*gpu*.py") if path.stem not in OF_THE_PACK]
    files += BENCHMARKS.glob("peers_llama_*.py")
    assert len(files) > 15
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                starts = {name.partition(".")[0], ".".join(name.split(".")[:2])}
                ours = name.startswith(("_gpu", "peers_llama")) and name not in OF_THE_PACK
                assert starts & THERE or ours, (path, name)


def test_the_parent_imports_no_pytorch() -> None:
    """It has the results, and must not fail; and PyTorch takes seconds."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documented_commands_are_commands() -> None:
    found = re.findall(r"^    +python benchmarks/gpu\.py (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert {text.split()[0] for text in found} == {"first", "second", "more", "case", "ready", "tables"}
    for text in found:
        with patch.object(sys, "argv", ["gpu.py", *shlex.split(text)]):
            assert isinstance(gpu._arguments(), Namespace)


@pytest.mark.slow("builds a pack for a GPU and runs it in the emulation")
def test_both_commands(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    """Correctness, and the speed of some kernels; then models, with the weights that the first has left."""
    ended, results = ran(gpu_pack, fake_library, tmp_path, "first", "--asked", "0")
    assert ended.returncode == 0, ended.stdout
    assert "[ 120.0 s] first: pack of commit the working tree, weights in " in ended.stdout
    assert STAND_IN in ended.stdout and "GREEN: nothing is wrong" in ended.stdout.splitlines()[-1]
    # Clocks that disagree count as a start of 120 s.
    assert results["stand_in"] and not results["models"] and not results["failed"]
    assert results["ping_pong"]["rounds"] == 100 and results["ping_pong"]["p99_s"] >= results["ping_pong"]["p50_s"] > 0
    assert results["start_s"].keys() == {"2", "5"} and all(results["start_s"].values())
    assert "a graph of 5 launches behind one that waits for the host is started in" in ended.stdout
    assert results["copy_bytes_per_s"] > 0
    small, timed = results["kernels"][: len(CASES)], results["kernels"][len(CASES) :]
    assert [row["label"] for row in small] == [case.label for case in CASES]
    assert [(row["label"], row["share"]) for row in timed] == [(TIMED[1].label, share) for share in (0.1, 0.2)]
    assert not any("seconds" in row for row in small) and all(row["seconds"] > 0 for row in timed)
    # Float32 against float64: the few roundings of sums of up to a hundred products; several tokens are multiplied as
    # halves.
    in_halves = {case.label for case in (*CASES, *TIMED) if "format" in case.parameters and case.parameters["rows"] > 1}
    assert in_halves
    for row in results["kernels"]:
        assert row["is_right"] and row["error"] < (5e-4 if row["label"] in in_halves else 1e-6)
    model, bundled, smoke = results["checks"]
    # Of the cache's float16, and of float32.
    assert model["is_right"] and model["error"] < 1e-4
    assert model["tokens"]["same"] == model["tokens"]["decided"] > 10
    assert model["computed"]["hot"] > 2 * model["computed"]["cold"] > 0
    assert bundled["is_right"] and bundled["tokens"]["rows"] == 8 and bundled["agreed"] == [4, 4]
    assert bundled["tokens_per_s"] > 0 and bundled["step"]["gpu_s"] > 0
    assert smoke["label"] == "llama-70b f16 hybrid_4090, smoke" and smoke["is_right"] and smoke["tokens_per_s"] > 0

    assert [line.partition(" ")[0] for line in results["writer"]] == ["weights", "memory:", "llama.cpp's"]
    work = tmp_path / "work" / "picompile-gpu"
    weights = work / "large" / "weights.safetensors"
    before = weights.stat().st_mtime_ns
    assert (work / "model.gguf").stat().st_size > 0
    ended, results = ran(gpu_pack, fake_library, tmp_path, "second")
    assert ended.returncode == 0, ended.stdout
    assert not results["checks"] and not results["failed"] and before > 0
    found = [(row["part"], row.get("variant"), row["skew"]) for row in results["models"]]
    assert found == [
        ("hybrid", "hybrid_4090", True),
        ("half the threads", "hybrid_4090", True),
        ("third", "hybrid", True),
        ("third", "copied", True),
    ]
    assert results["models"][3]["reason"].startswith("DoesNotFitError: PyTorch sees no GPU")
    for row in (row for row in results["models"] if row["variant"] != "copied"):
        # The context has no room for longer prompts.
        assert row["is_right"] and row["tokens_per_s"] > 0 and row["prompts"]["20"] > 0
        assert row["active"] == (0.3 if row["variant"] == "hybrid_4090" else 0.05)
        assert row["step"] is not None and "partial" not in row
    assert [row["write_s"] > 0 for row in results["models"][:3]] == [False, False, True]
    assert {row["label"] for row in results["kernels"]} == {case.label for case in TIMED}
    assert results["host_bytes_per_s"] and "memory of a 4090" in ended.stdout
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        *("first.json", "first.txt"),
        *("second.json", "second.txt"),
    ]
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.slow("builds a pack for a GPU and runs it in the emulation")
def test_what_is_left_for_a_second_quarter_of_an_hour(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    ended, results = ran(gpu_pack, fake_library, tmp_path, "more", name="more-llama-70b")
    assert ended.returncode == 0, ended.stdout
    assert [(row["variant"], row["skew"], row["is_right"]) for row in results["models"]] == [
        ("layers_dense", True, True),
        ("hybrid", False, True),
    ]


@pytest.mark.slow("builds a pack for a GPU and runs it in the emulation")
def test_one_kernel_alone(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    where = ["--work", str(tmp_path), "--device-library", str(fake_library)]
    script = [sys.executable, str(BENCHMARKS / "gpu.py"), "case", str(gpu_pack)]
    environment = os.environ | stand_in(gpu_pack)
    ended = subprocess.run(
        [*script, "timed linear", *where], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("timed linear") == 2 and "right yes" in ended.stdout and "µs" not in ended.stdout
    ended = subprocess.run([*script, "other", *where], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "has no kernel 'other', but linear, ffn" in ended.stderr


@pytest.mark.slow("builds a pack for a GPU and runs it in the emulation")
def test_a_run_that_is_ended_leaves_its_results_so_far(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(gpu_pack, fake_library, tmp_path, "first", "--scale", "10"),
        env=os.environ | stand_in(gpu_pack),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout
        assert any("right yes" in line for line in process.stdout)
        process.terminate()
        text = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    results = json.loads((tmp_path / "results" / "first.json").read_text())
    assert results["kernels"][0]["is_right"] and results["checks"][0]["reason"] == "was not come to"
    assert "whole models equal eager PyTorch | within 1e-3 |  | not measured" in text


@pytest.mark.slow("builds a pack for a GPU and runs it in the emulation")
def test_a_pack_of_other_sources_is_refused(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    for change, expected in (
        ({"sources": "0" * 64, "commit": "abc123"}, "at commit abc123"),
        ({"schema": 3}, "schema 3"),
    ):
        (folder / "pack.json").write_text(json.dumps(index_of(gpu_pack) | change))
        done = subprocess.run(
            command(folder, fake_library, tmp_path), capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 1 and expected in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_a_pack_names_its_sources() -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", sources_digest())
    assert sources_digest() == sources_digest()
    assert commit() == "unknown" or re.fullmatch(r"[0-9a-f]{12}\+?", commit())


def test_the_schedule_names_what_packs_have() -> None:
    """The kernels of the first command, the shares of their neurons, and the models of both."""
    cases = {case.label: case for case in speed_cases()}
    for label, shares in _gpu_schedule.FIRST_KERNELS.items():
        assert set(shares) <= set(cases[label].shares)
    rows = sum(max(1, len(shares)) for shares in _gpu_schedule.FIRST_KERNELS.values())
    assert rows == 16
    assert len(list(small_cases())) > 80
    assert [name.partition(":")[0] for name in pack_script.MODELS] == [_gpu_schedule._LARGE]
    planned = {f"{name}_{plan.target}" for plan in pack_script.PLANNED.values() for name in ("hybrid", "layers_dense")}
    assert planned == {"hybrid_4090", "layers_dense_4090"}


def test_threads_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((64, 16), (16, 16), (12, 12), (2, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert _gpu_schedule.threads() == expected
