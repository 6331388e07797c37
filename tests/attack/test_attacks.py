"""A short share of each attack, the same in every run; the scripts beside this file have the rest."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import api
import artifacts
import configs
import pytest
import replacements

from helpers.attacks import refusal_fault, run_case
from helpers.support import ROOT, BuildOnce, compile_for_test


def test_wrong_calls_are_refused_and_change_nothing(build_once: BuildOnce) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        api.write_folders(folder)

    folder = build_once("attacked-toys", make)
    assert not api.run([folder / "plain", folder / "hybrid"], 0)


@pytest.mark.slow("damages artifacts at random; single faults have fast tests")
def test_damaged_artifacts_are_refused_or_run(
    bases: list[artifacts.Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = artifacts.run(bases, tmp_path, 80, None, 0)
    assert report.failures == []
    assert report.ended["old hashes: refused"] == 40
    assert report.ended["right hashes: ran"] and report.ended["right hashes: refused"]


def test_faults_are_seen() -> None:
    """The attacks themselves: a case that crashes, hangs or raises is told from one that is refused."""

    def crash() -> str:
        import ctypes

        return ctypes.string_at(0).decode()

    def hang() -> str:
        while True:
            pass

    assert run_case(crash, 5).word == "signal"
    assert run_case(hang, 0.3).word == "hang"
    assert run_case(lambda: str(1 // 0), 5).word == "internal error"
    assert run_case(lambda: "2\nerror: x\n", 5).word == "2"
    assert refusal_fault("2", "error: x\n") is None
    assert all(refusal_fault(*wrong) for wrong in (("70", "error: x\n"), ("2", "error: x\ny\n"), ("2", "x\n")))


@pytest.mark.slow("compiles random configs; single wrong fields have fast tests")
def test_configs_are_compiled_as_transformers_computes_them_or_refused() -> None:
    outcomes = {seed: configs.run_case(seed) for seed in range(1_000, 1_014)}
    wrong = {seed: outcome.text for seed, outcome in outcomes.items() if outcome.way in ("different", "taken")}
    assert wrong == {}
    ways = Counter(outcome.way for outcome in outcomes.values())
    assert ways["equal"] >= 4, f"a drawing that is refused most of the time shows little: {ways}"


@pytest.mark.slow("lets two writers replace one path again and again")
@pytest.mark.parametrize("plain", [False, True], ids=["exchange", "two renamings"])
def test_two_writers_and_a_reader(
    plain: bool, tiny_artifact: Path, tiny_model: Path, build_once: BuildOnce, tmp_path: Path
) -> None:
    other = build_once("tiny-q4", lambda folder: compile_for_test(tiny_model, folder, quant="q4", context=64))
    (tmp_path / "work").mkdir()
    artifacts = (tiny_artifact, other)
    made, reads, failures = replacements.attack(artifacts, tmp_path / "work", 30, time.monotonic() + 600, 0, plain)
    assert failures == []
    assert made == 60
    assert reads.total() > 0


@pytest.mark.slow("kills commands that write, fills disks and damages checkpoints, again and again")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("writers.py", ["--number", "5", "--commands", "synth"]),
        ("disks.py", ["--number", "5", "--commands", "synth"]),
        ("caches.py", ["--number", "12"]),
        ("checkpoints.py", ["--number", "10"]),
        ("gguf_models.py", ["--number", "66"]),
        ("tokenizer_files.py", ["--number", "300"]),
        ("api.py", ["--number", "80"]),
    ],
)
def test_commands_lose_nothing_and_leave_nothing(script: str, arguments: list[str]) -> None:
    """In processes that have computed nothing before they fork."""
    words = [sys.executable, ROOT / "tests" / "attack" / script, "--seed", "1", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "; 0 failures" in done.stdout
