"""A short share of each attack, the same in every run; the scripts beside this file have the rest."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import api
import artifacts
import checkpoints
import configs
import pytest
import replacements
import soak

from helpers.attacks import refusal_fault, run_case
from helpers.support import ROOT, BuildOnce, compile_for_test


@pytest.mark.slow("makes hundreds of random calls per seed", but=("0",))
@pytest.mark.parametrize("seed", range(6))
def test_wrong_calls_are_refused_and_change_nothing(seed: int, build_once: BuildOnce) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        api.write_folders(folder)

    folder = build_once("attacked-toys", make)
    assert not api.run([folder / "plain", folder / "hybrid"], seed)


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


@pytest.mark.slow("damages checkpoints at random; single faults have fast tests")
def test_mutated_checkpoints_are_refused_in_one_line_or_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part of a compilation that reads the checkpoint, in this process; kernels are not made."""
    from picompile.cli.app import report

    checkpoints.save_good_checkpoint(tmp_path / "whole")
    checkpoints.save_good_checkpoint(tmp_path / "sharded", shard="20KB")
    capsys.readouterr()
    wrong, refused = {}, 0
    for seed in range(40):
        folder = tmp_path / f"model-{seed}"
        name = checkpoints.mutated(tmp_path / "whole", tmp_path / "sharded", folder, seed)
        try:
            _read(folder)
        except Exception as error:
            code, text = report(error, debug=False), capsys.readouterr().err
            refused += 1
            if fault := refusal_fault(code, text):
                wrong[seed] = f"{name}: {fault}: {text}"
        shutil.rmtree(folder, ignore_errors=True)
    assert wrong == {}
    assert refused >= 20


def _read(folder: Path) -> None:
    """Everything that a compilation reads of a checkpoint."""
    from picompile.cli.checks import require_model_folder
    from picompile.frontend.checkpoint import fingerprint
    from picompile.frontend.hf import open_checkpoint
    from picompile.frontend.tokenizer_files import generation_eos, read_tokenizer

    require_model_folder(folder)
    checkpoint = open_checkpoint(folder)
    fingerprint(folder)
    for name in checkpoint.weights.names():
        checkpoint.weights.load(name)
    read_tokenizer(folder, checkpoint.facts.vocab)
    generation_eos(folder)


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
    report = replacements.attack((tiny_artifact, other), tmp_path, 30, time.monotonic() + 600, 0, plain)
    assert report.failures == []
    assert report.replacements == 60
    assert report.reads.total() > 0


@pytest.mark.slow("makes rounds of random calls; single calls have fast tests")
def test_rounds_leave_nothing(tmp_path: Path) -> None:
    """Whatever is kept of each round is seen at once, but for memory, which allocators keep."""
    held, _ = soak.soak(api.write_folders(tmp_path), tmp_path, 0, seed=1, warm=4)
    assert not soak.growth(held, replace(soak.MAY_GROW, resident_mib=64.0))


def test_resources_that_grow_are_found() -> None:
    held = [soak.Held(100, 3 + number // 6, 9, 300, 1) for number in range(12)]
    assert soak.growth(held) == ["threads grew from 3.0 to 4.0"]
    assert len(soak.growth([soak.Held(5.0 * number, number, number, 9 * number, number) for number in range(12)])) == 5


@pytest.mark.slow("kills commands that write, fills disks and damages checkpoints, again and again")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("writers.py", ["--number", "5", "--commands", "synth"]),
        ("disks.py", ["--number", "5", "--commands", "synth"]),
        ("caches.py", ["--number", "12"]),
        ("checkpoints.py", ["--number", "4"]),
    ],
)
def test_commands_lose_nothing_and_leave_nothing(script: str, arguments: list[str]) -> None:
    """In processes that have computed nothing before they fork."""
    words = [sys.executable, ROOT / "tests" / "attack" / script, "--seed", "1", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "; 0 failures" in done.stdout
