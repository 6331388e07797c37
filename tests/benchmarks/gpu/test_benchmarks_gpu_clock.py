"""The clock of benchmarks.gpu, with sleep in the place of all work: parts end in time, whatever they do.

The times of the schedule are scaled: a second stands for 12 of them. Starting a machine took 80 s here, not 120 as
estimated, since a process that only sleeps takes as long to begin as one that works.
"""

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment
from benchmarks.gpu import schedule as _gpu_schedule
from benchmarks.gpu.sources import SCHEMA, sources_digest
from benchmarks.gpu.units import LATE, NOT_DONE

SCALE = 1 / 12
# What a part may take longer: the child has half a second for its stacks, and then is ended.
_LATER_S = 1.2
_MODEL = {
    "model": "llama-70b", "quant": "q4", "budget": 0.6, "dense_bytes": 1, "weight_bytes": 1, "hot": 64,
    "resident_layers": 1, "plan": None, "shape": {}, "gguf": "llama-70b.gguf.zip",
}  # fmt: skip
_CASE = {"op": "linear", "shares": [], "speed": False}


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A list of what is in a pack, which pretended work does not read."""
    labels = [f"small {number}" for number in range(12)], [*_gpu_schedule.FIRST_KERNELS][:3]
    checks = [{"model": "check", "quant": quant, "variant": "hybrid"} for quant in ("f16", "q4")]
    index = {
        "schema": SCHEMA, "commit": "none", "sources": sources_digest(), "host": "host.so", "sm": 90,
        "kernels": [
            {"folder": folder, "cases": [_CASE | {"label": label} for label in of_folder]}
            for folder, of_folder in zip(("small", "speed"), labels, strict=True)
        ],
        "checks": checks, "bundled": [{"model": "tiny", "quant": "q4", "variant": "split"}], "llama": "llama.tar.xz",
        "models": [_MODEL | {"variant": f"{name}{of}"} for name in ("hybrid", "layers_dense") for of in ("", "_4090")],
    }  # fmt: skip
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "pack.json").write_text(json.dumps(index))
    return tmp_path / "pack"


def _ran(
    verb: str, pack: Path, pretend: Mapping[str, Any], started_s: float = 80.0
) -> tuple[int, str, dict[str, Any], float]:
    """The exit code of a command, what it printed, its results and the seconds of the schedule that it took."""
    folder, begin = pack.parent, time.monotonic()
    asked = ["--asked", str(time.time() - started_s)] if verb == "first" else []
    where = ["--results", str(folder / "results"), "--work", str(folder / "work")]
    command = [sys.executable, "-m", "benchmarks.gpu", verb, str(pack), *where, *asked, "--scale", str(SCALE)]
    command += ["--pretend", json.dumps(pretend)]
    variables = environment(PYTHONUNBUFFERED="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    results = json.loads((folder / "results" / f"{verb}.json").read_text())
    return done.returncode, done.stdout, results, (time.monotonic() - begin) / SCALE


def _ends(verb: str, text: str, pack: Path) -> dict[str, tuple[float, float]]:
    """When the last line of each part was printed, and when the part must have ended."""
    index = json.loads((pack / "pack.json").read_text())
    options = Namespace(active=0.05)
    lines = [line for line in text.splitlines() if line.startswith("[")]
    ends = {}
    for part in _gpu_schedule.parts_of(verb, options, index):
        labels = {unit.facts.get("label", unit.kind) for unit in part.units}
        times = [float(line[1:7]) for line in lines if any(f"] {label}:" in line for label in labels)]
        if times:
            ends[part.name] = (times[-1], part.ends_s)
    return ends


@pytest.mark.slow("runs a whole schedule by the clock")
@pytest.mark.parametrize("part", ["small kernels", "models", "smoke", "kernel times"])
def test_a_part_that_hangs_leaves_time_for_the_next(part: str, pack: Path) -> None:
    code, text, results, took_s = _ran("first", pack, {part: {"how": "hangs"}})
    rows = [*results["kernels"], *results["checks"]]
    of_part = [row for row in rows if row["part"] == part]
    assert of_part and {row["part"] for row in rows} == {"small kernels", "models", "smoke", "kernel times"}
    # The first hung until the part was over; nothing else of it was begun. A small kernel hangs 10 s at most.
    assert all(row["is_right"] is not True for row in of_part)
    if part == "small kernels":
        assert code == 1 and all("nothing came within" in row["reason"] for row in of_part[:6])
    else:
        # Speeds may be missing; what must be right may not.
        assert code == (0 if part == "kernel times" else 2) and {row["reason"] for row in of_part} <= {LATE, NOT_DONE}
        assert all(row["is_right"] for row in rows if row["part"] != part)
    for name, (last_s, ends_s) in _ends("first", text, pack).items():
        assert last_s <= ends_s + _LATER_S / SCALE, name
    assert took_s < 310 - 80 + 2 * _LATER_S / SCALE


@pytest.mark.slow("runs a whole schedule by the clock", but=("wrong",))
@pytest.mark.parametrize(("how", "code"), [("wrong", 1), ("hangs", 2)])
def test_nothing_is_begun_behind_a_gate_that_is_wrong_or_late(pack: Path, how: str, code: int) -> None:
    found, text, results, took_s = _ran("first", pack, {"machine": {"how": how}})
    assert found == code and "NOT GREEN: " in text.splitlines()[-1]
    assert took_s < (60 if how == "wrong" else 150 - 80 + 2 * _LATER_S / SCALE)
    assert (results["failed"][0].get("reason") == LATE) == (how == "hangs")
    assert {row["reason"] for row in (*results["kernels"], *results["checks"])} == {NOT_DONE}
