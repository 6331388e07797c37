"""A pack and benchmarks.gpu, on the stand-in for the GPU: what is right, and what is said of planted faults."""

import ast
import json
import re
import shlex
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import environment
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.report import STAND_IN
from benchmarks.gpu.units import NOT_DONE
from helpers.gpu_packs import (
    CASES,
    TIMED,
    command,
    fake_cuda,
    fake_library,
    gpu_pack,
    index_of,
    kernels,
    ran,
)
from helpers.kernels.emulator import Emulated
from helpers.support import ROOT

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]


DOCUMENT = ROOT / "docs" / "gpu_first_run.md"
# On the side of the GPU there are these and nothing of picompile but its runtime, and of its passes the dialect.
THERE = {
    "picompile_runtime",
    "picompile_passes.dialect",
    "picompile_passes.formats",
    "numpy",
    "torch",
    *sys.stdlib_module_names,
}
OURS = {"benchmarks", "benchmarks.gpu", "benchmarks.outputs"}
# Modules that make a pack, or count without a GPU.
AT_HOME = {"cases", "models", "split", "pack_bundled", "pack_gguf", "pack"}


def test_what_runs_on_the_gpu_imports_no_compiler() -> None:
    """That machine has no compiler of picompile's, and a missing package would cost a loan of it."""
    files = [path for path in (ROOT / "benchmarks" / "gpu").glob("*.py") if path.stem not in AT_HOME]
    assert len(files) > 15
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                starts = {name.partition(".")[0], ".".join(name.split(".")[:2])}
                package, _, module = name.rpartition(".")
                ours = name in OURS or (package == "benchmarks.gpu" and module not in AT_HOME)
                assert starts & THERE or ours, (path, name)


def test_the_parent_imports_no_pytorch() -> None:
    """It has the results, and must not fail; and PyTorch takes seconds."""
    code = "import sys, benchmarks.gpu.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_documented_commands_are_commands() -> None:
    found = re.findall(r"^    +python -m benchmarks\.gpu (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert {text.split()[0] for text in found} == {"first", "second", "case", "ready", "tables"}
    for text in found:
        with patch.object(sys, "argv", ["benchmarks.gpu", *shlex.split(text)]):
            assert isinstance(gpu._arguments(), Namespace)


@pytest.mark.slow("builds a pack for a GPU and runs it in the emulation")
def test_all_commands(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    """Correctness, and the speed of some kernels; then models, with the weights that the first has left."""
    ended, results = ran(gpu_pack, fake_library, tmp_path, "first", "--asked", "0")
    assert ended.returncode == 0, ended.stdout
    assert STAND_IN in ended.stdout and "GREEN: nothing is wrong" in ended.stdout.splitlines()[-1]
    # Clocks that disagree count as a start of 120 s.
    assert re.search(r"\[ 12\d\.\d s\] first: pack of commit the working tree, weights in ", ended.stdout)
    assert results["stand_in"] and not results["models"] and not results["failed"]
    assert results["ping_pong"]["rounds"] == 100 and results["ping_pong"]["p99_s"] >= results["ping_pong"]["p50_s"] > 0
    assert results["start_s"].keys() == {"2", "5"} and all(results["start_s"].values())
    assert results["copy_bytes_per_s"] > 0
    _check_kernels(results["kernels"])
    model, bundled, smoke = results["checks"]
    assert model["is_right"] and bundled["is_right"] and smoke["is_right"]
    # Of the cache's float16, and of float32.
    assert model["error"] < 2e-4 and model["tokens"]["same"] == model["tokens"]["decided"] > 10
    assert model["computed"]["hot"] > 2 * model["computed"]["cold"] > 0
    assert bundled["tokens"]["rows"] == 8 and bundled["agreed"] == [4, 4] and bundled["step"]["gpu_s"] > 0

    work = tmp_path / "work" / "picompile-gpu"
    # A pack without llama.cpp needs no file for it.
    assert not (work / "model.gguf").exists() and (work / "large" / "weights.safetensors").exists()
    ended, results = ran(gpu_pack, fake_library, tmp_path, "second")
    assert ended.returncode == 0 and not results["checks"] and not results["failed"], ended.stdout
    assert [(row["part"], row.get("variant")) for row in results["models"]] == [
        *(("hybrid", "hybrid_4090"), ("half the threads", "hybrid_4090"), ("third", "hybrid"), ("third", "copied")),
    ]
    assert results["models"][3]["reason"].startswith("DoesNotFitError: PyTorch sees no GPU")
    for row in results["models"][:3]:
        # The context has no room for longer prompts.
        assert row["is_right"] and row["tokens_per_s"] > 0 and row["prompts"]["20"] > 0
        assert row["active"] == (0.3 if row["variant"] == "hybrid_4090" else 0.05)
        assert row["step"] is not None and "partial" not in row
    assert [row["write_s"] > 0 for row in results["models"][:3]] == [False, False, True]
    assert {row["label"] for row in results["kernels"]} == {case.label for case in TIMED}
    assert not list((tmp_path / "work").iterdir())


def _check_kernels(rows: list[dict[str, Any]]) -> None:
    """Assert that the small kernels and one of those that are timed are right, and only the latter has times."""
    small, timed = rows[: len(CASES)], rows[len(CASES) :]
    assert [row["label"] for row in small] == [case.label for case in CASES]
    assert [(row["label"], row["share"]) for row in timed] == [(TIMED[1].label, share) for share in (0.1, 0.2)]
    assert not any("seconds" in row for row in small) and all(row["seconds"] > 0 for row in timed)
    # Float32 against float64: the few roundings of sums of up to a hundred products; several tokens are multiplied as
    # halves.
    in_halves = {case.label for case in (*CASES, *TIMED) if "format" in case.parameters and case.parameters["rows"] > 1}
    assert in_halves
    for row in rows:
        assert row["is_right"] and row["error"] < (5e-4 if row["label"] in in_halves else 1e-6)


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


MakePack = Callable[..., Path]


@pytest.fixture
def broken_pack(gpu_pack: Path, tmp_path: Path) -> MakePack:
    """Packs of the small kernels alone, one of which does something else."""

    def make(label: str, instead: str) -> Path:
        folder, index = tmp_path / "pack", index_of(gpu_pack)
        folder.mkdir()
        index |= {"kernels": index["kernels"][:1], "checks": [], "bundled": [], "models": []}
        (folder / "pack.json").write_text(json.dumps(index))
        for name in ("small.zip", "host.so"):
            (folder / name).symlink_to(gpu_pack / name)
        (kernel,) = (case["kernel"] for case in index["kernels"][0]["cases"] if case["label"] == label)
        with zipfile.ZipFile(folder / "small.zip") as archive:
            launches = json.loads(archive.read("device.json"))["kernels"][kernel]
            source = archive.read("device.cu").decode()
        for symbol in {launch["symbol"] for launch in launches}:
            source, count = re.subn(rf"({symbol}\([^)]*\) {{\n)", rf"\g<1>{instead}\n", source)
            assert count == 1
        Emulated(source, folder / "emulated.so")
        return folder

    return make


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
@pytest.mark.parametrize(
    ("instead", "reason", "told"),
    [
        ("return;", "", ()),
        # It is ended once it takes longer than any small kernel does, and says where the process was.
        ("volatile int on = 1; while (on) {}", "nothing came within 20 s", ("Timeout", "accelerator.py", "in wait")),
        # As where the driver's library does.
        ("__builtin_trap();", r"the process ended with -\d+ \(SIG[A-Z]+\)", ("Fatal Python error", "in _check")),
    ],
    ids=["wrong", "endless", "crashing"],
)
def test_a_bad_kernel(
    broken_pack: MakePack, fake_library: Path, tmp_path: Path, instead: str, reason: str, told: tuple[str, ...]
) -> None:
    """It is named, and the others are right all the same. One that ends is run once more under compute-sanitizer."""
    script = tmp_path / "bin" / "compute-sanitizer"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "checked: $*"\n')
    script.chmod(0o755)
    path = {"PATH": f"{script.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    pack = broken_pack("norm", instead)
    options = ("--scale", "2", "--asked", str(time.time() - 60)) if "on" in instead else ()
    ended, results = ran(pack, fake_library, tmp_path, "first", *options, variables=path)
    assert ended.returncode == 1 and len(results["kernels"]) == len(CASES)
    (row,) = (row for row in results["kernels"] if not row["is_right"])
    assert row["label"] == "norm" and re.fullmatch(reason, row.get("reason", ""))
    assert all(text in row["traceback"] for text in told)
    assert "NOT GREEN" in ended.stdout.splitlines()[-1] and "wrong: norm" in ended.stdout
    if not reason:
        assert row["sanitizer"].keys() == {"memcheck", "racecheck"}
        for tool, text in row["sanitizer"].items():
            assert text.startswith(f"checked: --tool {tool} ") and f"benchmarks.gpu case {pack} norm" in text


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_too_little_memory(gpu_pack: Path, fake_library: Path, tmp_path: Path) -> None:
    """A case that does not fit is neither wrong nor measured, and says what it lacked."""
    few = {"FAKE_CUDA_MEMORY": str(2**17)}
    ended, results = ran(gpu_pack, fake_library, tmp_path, variables=few)
    # Nothing of it is wrong, and whether it is right is not known.
    assert ended.returncode == 2 and "NOT GREEN: 3 that must be right were not measured" in ended.stdout
    labels = ["llama-70b f16 hybrid", "model f16 split", "llama-70b f16 hybrid_4090, smoke"]
    assert [row["label"] for row in results["checks"]] == labels
    for row in results["checks"]:
        assert row["is_right"] is None and row["reason"].startswith("DoesNotFitError: ")
        assert "of GPU memory" in row["reason"] and "DoesNotFitError" in row["traceback"]
    assert "whole models give the same tokens | all |  | not measured" in ended.stdout


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
@pytest.mark.parametrize(
    ("variables", "label", "reason"),
    [
        ({"FAKE_CUDA_BLIND": "1"}, "ping_pong", "MachineError: "),
        ({"FAKE_CUDA_QUEUE": "4"}, "queue", "MachineError: the GPU's queue takes fewer than 1500 launches"),
        ({"FAKE_CUDA_DEVICES": "0"}, "machine", "NoGpuError: the NVIDIA driver has no device"),
    ],
    ids=["blind", "short queue", "no GPU"],
)
def test_what_stops_a_run(
    variables: dict[str, str], label: str, reason: str, gpu_pack: Path, fake_library: Path, tmp_path: Path
) -> None:
    """Nothing works if host and GPU do not see each other's writes, or a step does not fit the queue."""
    ended, results = ran(gpu_pack, fake_library, tmp_path, variables=variables)
    assert ended.returncode == 1
    failed = {row["label"]: row for row in results["failed"] if row["is_right"] is False}
    assert list(failed) == [label] and failed[label]["reason"].startswith(reason) and failed[label]["traceback"]
    others = [*results["kernels"], *results["checks"]]
    assert len(others) > len(CASES) and {row["reason"] for row in others} == {NOT_DONE}
    last = "NOTHING WAS MEASURED: there is no GPU" if label == "machine" else "NOT GREEN"
    assert ended.stdout.splitlines()[-1].startswith(last)
