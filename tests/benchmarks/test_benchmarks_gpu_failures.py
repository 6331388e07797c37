"""Messages of benchmarks/gpu.py on failures: a wrong kernel, one that hangs or crashes, too little memory.

Each is planted in a stand-in for the GPU. A run must end by itself, name what failed, and go on with the rest.
"""

import json
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_packs import BENCHMARKS, CASES, fake_cuda, fake_library, gpu_pack, index_of, kernels, ran, run_options
from helpers.kernels.emulator import Emulated

sys.path.insert(0, str(BENCHMARKS))

import _gpu_faults
import _gpu_growth
import _gpu_host
from _gpu_kernels import images_of
from _gpu_report import empty_results, text_of
from _gpu_units import LATE, NOT_DONE, Unit, Workers, rows

from picompile_runtime import DoesNotFitError

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]

# What a kernel does instead.
NOTHING, FOR_EVER, ABORTS = "return;", "volatile int on = 1; while (on) {}", "__builtin_trap();"

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


def _reasons(results: dict[str, Any]) -> dict[str, tuple[bool | None, str]]:
    return {row["label"]: (row["is_right"], row.get("reason", "")) for row in results["kernels"]}


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_a_wrong_kernel(
    broken_pack: MakePack, fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, run once more under compute-sanitizer, and the others are right all the same."""
    script = tmp_path / "bin" / "compute-sanitizer"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "checked: $*"\n')
    script.chmod(0o755)
    path = f"{script.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    pack = broken_pack("norm", NOTHING)
    ended, results = ran(pack, fake_library, tmp_path, variables={"PATH": path})
    assert ended.returncode == 1
    wrong = [row for row in results["kernels"] if not row["is_right"]]
    assert [row["label"] for row in wrong] == ["norm"] and len(results["kernels"]) == len(CASES)
    assert wrong[0]["sanitizer"].keys() == {"memcheck", "racecheck"}
    for tool, text in wrong[0]["sanitizer"].items():
        assert text.startswith(f"checked: --tool {tool} ") and f"gpu.py case {pack} norm" in text
    assert "NOT GREEN" in ended.stdout.splitlines()[-1]
    assert "wrong: norm" in ended.stdout and "| norm | NO |" in ended.stdout


@pytest.mark.slow("waits until a sanitizer that hangs is ended")
def test_a_sanitizer_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _gpu_sanitizer

    script = tmp_path / "compute-sanitizer"
    script.write_text("#!/bin/sh\necho begun\nsleep 600\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(_gpu_sanitizer, "_LIMIT_S", 1.0)
    rows = [{"label": "fine", "is_right": True}, {"label": "norm", "is_right": False}]
    _gpu_sanitizer.sanitize(rows, run_options(tmp_path, tmp_path, tmp_path / "work"), time.monotonic() + 60)
    assert rows[1]["sanitizer"] == dict.fromkeys(("memcheck", "racecheck"), "begun\n\nended after 1 s")
    assert "sanitizer" not in rows[0]
    # All runs together have a minute, and there is none left.
    monkeypatch.setattr(_gpu_sanitizer, "_ALL_S", 5.0)
    rows = [{"label": "norm", "is_right": False}]
    _gpu_sanitizer.sanitize(rows, run_options(tmp_path, tmp_path, tmp_path / "work"), time.monotonic() + 60)
    assert "sanitizer" not in rows[0]


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_a_kernel_that_never_ends(broken_pack: MakePack, fake_library: Path, tmp_path: Path) -> None:
    """It is ended once it takes longer than any small kernel does, says where the process was, and the rest goes on."""
    pack = broken_pack("norm", FOR_EVER)
    begun = str(time.time() - 60)
    ended, results = ran(pack, fake_library, tmp_path, "first", "--scale", "2", "--asked", begun)
    assert ended.returncode == 1
    reasons = _reasons(results)
    assert [label for label, (is_right, _) in reasons.items() if not is_right] == ["norm"]
    assert reasons["norm"] == (False, "nothing came within 20 s")
    (row,) = (row for row in results["kernels"] if row["label"] == "norm")
    assert "Timeout" in row["traceback"] and "accelerator.py" in row["traceback"] and "in wait" in row["traceback"]
    assert "| norm | NO |" in ended.stdout


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_a_kernel_that_never_ends_is_late_where_its_time_is_over(
    broken_pack: MakePack, fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = broken_pack("norm", FOR_EVER)
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(pack / "emulated.so"))
    monkeypatch.setenv("FAKE_CUDA_SM", "90")
    found = _rows(pack, fake_library, tmp_path, ["leading", "norm", "linear"], seconds=40.0)
    assert [row["is_right"] for row in found] == [True, None, None]
    assert [row.get("reason") for row in found[1:]] == [LATE, NOT_DONE]
    assert "in wait" in found[1]["traceback"]


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_a_kernel_that_crashes(broken_pack: MakePack, fake_library: Path, tmp_path: Path) -> None:
    """As where the driver's library does."""
    pack = broken_pack("norm", ABORTS)
    ended, results = ran(pack, fake_library, tmp_path)
    assert ended.returncode == 1
    reasons = _reasons(results)
    assert re.fullmatch(r"the process ended with -\d+ \(SIG[A-Z]+\)", reasons["norm"][1])
    assert [label for label, (is_right, _) in reasons.items() if not is_right] == ["norm"]
    (row,) = (row for row in results["kernels"] if row["label"] == "norm")
    assert "Fatal Python error" in row["traceback"] and "in _check" in row["traceback"]


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


def _rows(
    pack: Path, library: Path, folder: Path, labels: list[str], seconds: float = 600.0, limit_s: float = 60.0
) -> list[dict[str, Any]]:
    """Rows of kernels; those that the pack does not have are of a folder that is not there."""
    cases = {case["label"]: case | {"folder": "small"} for case in index_of(pack)["kernels"][0]["cases"]}
    ends_s, missing = time.monotonic() + seconds, {"folder": "none", "speed": False}
    found = []
    with Workers(run_options(pack, library, folder / "work")) as workers:
        for label in labels:
            unit = Unit("kernel", "kernels", cases.get(label, missing), {"label": label}, limit_s, ends_s=ends_s)
            found += rows(unit, workers)
    return found


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_one_failing_kernel_leaves_the_others_measured(
    gpu_pack: Path, kernels: dict[str, dict[str, Any]], fake_library: Path, tmp_path: Path
) -> None:
    found = _rows(gpu_pack, fake_library, tmp_path, ["norm", "other", "leading"])
    assert [(row["label"], row["is_right"]) for row in found] == [("norm", True), ("other", False), ("leading", True)]
    assert found[1]["reason"].startswith("FileNotFoundError: ") and "\n" not in found[1]["reason"]
    assert "in images_of" in found[1]["traceback"] and found[1]["traceback"].count("\n") > 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_processes_that_crash_or_hang(gpu_pack: Path, tmp_path: Path) -> None:
    """Before a driver has done anything: when its library is loaded."""
    libraries = {"abort": tmp_path / "abort.so", "pause": tmp_path / "pause.so"}
    for name, path in libraries.items():
        source = (
            f"#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void f() {{ {name}(); }}"
        )
        subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=source, text=True, check=True)
    found = _rows(gpu_pack, libraries["abort"], tmp_path, ["norm", "leading"])
    ended = f"the process ended with -{signal.SIGABRT.value} (SIGABRT)"
    assert [(row["label"], row["is_right"], row["reason"]) for row in found] == [
        ("norm", False, ended),
        ("leading", False, ended),
    ]
    assert all("Fatal Python error: Aborted" in row["traceback"] for row in found)
    # Those whose time is over while their process begins were not begun.
    late = _rows(gpu_pack, libraries["pause"], tmp_path, ["norm", "leading"], seconds=0.1)
    assert [(row["is_right"], row["reason"]) for row in late] == [(None, NOT_DONE)] * 2
    (row,) = _rows(gpu_pack, libraries["pause"], tmp_path, ["norm"], limit_s=1.0)
    assert (row["is_right"], row["reason"]) == (False, "nothing came within 1 s")


@pytest.mark.slow("touches memory and measures its growth")
def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _gpu_growth.touch(2**27 + 5, 60.0)
    assert found["bytes"] == 2**27 + 5 and found["free_bytes_after"] > 0
    with pytest.raises(DoesNotFitError, match=r"memory comes too slowly: 0\.0 GB of 0\.1 were there after -1 s"):
        _gpu_growth.touch(2**27, -1.0)
    monkeypatch.setattr(_gpu_growth, "_PART_BYTES", 2**60)
    with pytest.raises(DoesNotFitError, match=r"beside 0\.0 GB no more memory can be had"):
        _gpu_growth.touch(2**60, 60.0)


def test_exit_codes_and_signals_are_explained() -> None:
    assert _gpu_faults.ending(1) == "the process ended with 1"
    assert _gpu_faults.ending(-11) == "the process ended with -11 (SIGSEGV)"
    assert _gpu_faults.ending(-9).endswith("-9 (SIGKILL): the system may have run out of memory")


@pytest.mark.slow("runs a pack with a planted fault in processes of its own")
def test_a_gpu_that_takes_few_launches(
    gpu_pack: Path, kernels: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits in the launch for a GPU that waits for the host: that ends, and is said."""
    monkeypatch.setenv("FAKE_CUDA_QUEUE", "4")
    found = _gpu_host.start_seconds(images_of(gpu_pack, "small"), gpu_pack / "host.so", (2, 9))
    assert found["2"] is not None and found["2"] > 0 and found["9"] is None
    results = empty_results(3, False) | {"machine": {"gpu": "G", "driver": "13.0", "torch": "2"}, "start_s": found}
    assert "a graph of 9 launches behind one that waits for the host takes no more: it waits" in text_of(results)
