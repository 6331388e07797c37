"""Tests of how kernels prefetch on this machine: measurements, choices, the file that keeps them, `compile --tune`."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.kernels.emulated import require
from helpers.kernels.workbench import Workbench
from helpers.support import Cli
from picompile.artifact.code import Code, tuned_code
from picompile.machine import tuning
from picompile.machine.kept import digest
from picompile.machine.kernel_calls import fill_with_bytes
from picompile.machine.tuning import PrefetchTrial, Tuning, measure, questions, tuned
from picompile.progress import NoProgress
from picompile_codegen import cpu
from picompile_codegen.build.isa import ISAS, Isa, Prefetching, targeting
from picompile_runtime import MachineError

ISA = ISAS["x86-64-v3"]
MACHINE = {"processor": "processor of nobody", "threads": 3}


def chosen(choice: tuning.Choice) -> Isa:
    return replace(ISA, prefetching=replace(ISA.prefetching, **choice))


def test_every_choice_is_measured_over_whole_caches() -> None:
    asked = {name for question in questions(ISA) for choice in question.choices for name in choice}
    assert asked == {field.name for field in fields(Prefetching)}
    for question in questions(ISA):
        assert chosen(question.choices[0]) == ISA, "the first choice is the default"
    question = questions(ISA)[1]
    with targeting(ISA):
        arguments = tuning._arguments(question, cpu.write_kernel(question.spec))
    assert len(arguments) > 1
    for each in arguments:
        assert each["k_cache"].shape[-2] == 1024
        assert each["step"][:2].tolist() == [1, 1023]


@pytest.mark.slow("compiles kernels for seconds; one question is fast", but=("3]",))
@pytest.mark.parametrize("number", range(4))
def test_a_choice_changes_a_kernel_and_no_bit_of_its_result(number: int, tmp_path: Path) -> None:
    question = questions(ISA)[number]
    codes, results = set(), set()
    for index, choice in enumerate(question.choices):
        with targeting(chosen(choice)):
            kernel = cpu.write_kernel(question.spec)
        codes.add(str(kernel.prim_func))
        if index not in (0, 1, len(question.choices) - 1):
            continue
        bench, rng = Workbench(tmp_path / f"{index}" / "kernel.so", (), chosen(choice)), np.random.default_rng(number)
        bench.path.parent.mkdir()
        inputs = {}
        for argument in kernel.arguments:
            name, _, part = argument.name.partition(".")
            if name in ("y", "stats", "step") or part == "scale":
                continue
            dtype = np.dtype(argument.dtype)
            # A few bytes make finite numbers of every type, and masks of 0 and 1.
            few = rng.integers(0, 2, argument.shape) if dtype.kind in "iu" else rng.uniform(-1, 1, argument.shape)
            inputs[name] = few.astype(dtype)
            if argument.name in question.copied:
                fill_with_bytes(inputs[name], rng)
        inputs["stats"] = np.zeros(2, np.int64)
        result = bench.run(kernel, inputs, tokens=1, position=question.position, slot=0)["y"]
        assert result.any() and np.isfinite(result).all()
        results.add(result.tobytes())
    assert len(codes) == len(question.choices)
    assert len(results) == 1


def with_speeds(monkeypatch: pytest.MonkeyPatch, speeds: dict[str, list[list[float]]]) -> None:
    """Have races find these speeds of each choice in each round, as multiples of the first's.

    A race of one choice against the first, once more, finds what it found before unless `NAME again` has speeds.
    """

    class Raced:
        def __init__(self, question: Any, *_: Any) -> None:
            self.name, self.choices = question.name, question.choices

        def run(self, trials: Sequence[PrefetchTrial] | None = None) -> list[PrefetchTrial]:
            if trials is None:
                wanted, rounds = self.choices[1:], speeds.get(self.name, [[0.5] * (len(self.choices) - 1)] * 4)
            else:
                wanted = [trial.choice for trial in trials]
                rounds = speeds.get(f"{self.name} again", [[trial.speed for trial in trials]] * 4)
            seconds = np.hstack([np.ones((len(rounds), 1)), 1 / np.array(rounds)])
            return tuning.trials_of(self.name, [self.choices[0], *wanted], seconds)

    monkeypatch.setattr(tuning, "_Race", Raced)


def test_the_default_stays_unless_another_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    with_speeds(
        monkeypatch,
        {
            "panels": [[1.02], [1.02], [1.02], [1.02]],  # hardly faster
            "caches": [[0.7], [0.9], [1.5], [1.6]],  # faster in half of the rounds
            "rows": [[1.1, 1.2]] * 4,
            "rows again": [[1.01]] * 4,  # not once more
        },
    )
    found = measure(ISA, MACHINE, NoProgress())
    assert found.choice == {}
    assert len(found.trials) == 1 + sum(len(question.choices) - 1 for question in questions(ISA))


def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {
        "caches": [[1.3]] * 4,
        "scattered rows": [[1.1, 1.2, 1.0, 1.4, 1.3]] * 4,
        "rows, chosen level": [[1.01]] * 4,
        "rows": [[1.1, 1.2]] * 4,
    }
    with_speeds(monkeypatch, speeds)
    found = measure(ISA, MACHINE, NoProgress())
    scattered = {"rows_into_first_level": True, "scattered_bytes_ahead": 8192}
    assert found.choice == {"caches_into_first_level": False, **scattered, "row_bytes_ahead": 16384}
    # A level that makes rows slower that follow one another is not taken, nor the distance that goes with it.
    with_speeds(monkeypatch, speeds | {"rows, chosen level": [[1.05]] * 4})
    found = measure(ISA, MACHINE, NoProgress())
    assert found.choice == {"caches_into_first_level": False, "row_bytes_ahead": 16384}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The processors that were measured; each finds another choice."""
    times: list[str] = []

    def measured(isa: Isa, machine: Any, progress: Any) -> Tuning:
        times.append(machine["processor"])
        choice = {"row_bytes_ahead": 1024 * len(times)}
        return Tuning(isa.name, machine, (PrefetchTrial("rows", choice, 1.5, 1.25),), choice)

    monkeypatch.setattr(tuning, "measure", measured)
    return times


def test_a_machine_is_measured_once(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    two, one = (tuned(ISA, threads, NoProgress()) for threads in (2, 1))
    assert two.apply(ISA) == chosen({"row_bytes_ahead": 1024})
    assert [tuned(ISA, threads, NoProgress()) for threads in (2, 1)] == [two, one], "both are kept"
    assert counted == [tuning.processor()] * 2
    monkeypatch.setattr(tuning, "processor", lambda: "another")
    assert tuned(ISA, 1, NoProgress()).apply(ISA) == chosen({"row_bytes_ahead": 3 * 1024})
    assert len(counted) == 3


DAMAGED: dict[str, dict[str, Any]] = {
    "of a choice that there is not": {"choice": {"row_bytes_behind": 4096}},
    "of a distance below 0": {"choice": {"row_bytes_ahead": -1}},
    "with a trial that has no speed": {"trials": [{"kernel": "rows", "choice": {}, "low": 1.0}]},
    "with a speed that is no number": {"trials": [{"kernel": "rows", "choice": {}, "low": 1.0, "speed": "x"}]},
    "of other defaults": {"default": {}},
}


def test_a_damaged_file_counts_as_missing(counted: list[str]) -> None:
    machine = dict(tuned(ISA, 2, NoProgress()).machine)
    path = tuning.tuning_file(ISA.name, machine)
    content = json.loads(path.read_text())
    damaged = [content | {"choice": {"row_bytes_ahead": 4096}}]  # which does not fit its digest
    for change in DAMAGED.values():
        other = {name: value for name, value in (content | change).items() if name != "sha256"}
        damaged.append(other | {"sha256": digest(other)})
    for times, text in enumerate(["", "{", "[]", '{"schema": 1}', *map(json.dumps, damaged)], start=2):
        path.write_text(text)
        assert tuned(ISA, 2, NoProgress()).apply(ISA) == chosen({"row_bytes_ahead": 1024 * times}), text
        assert len(counted) == times


def test_a_file_that_cannot_be_written_costs_only_time(
    counted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tuned(ISA, 2, NoProgress())
    tuned(ISA, 2, NoProgress())
    assert len(counted) == 2


@pytest.mark.parametrize("model", [17, 1])
def test_clouds_sell_different_processors_by_one_name(monkeypatch: pytest.MonkeyPatch, model: int) -> None:
    text = f"processor : 0\nmodel name : AMD EPYC\ncpu family : 25\nmodel : {model}\n\nprocessor : 1\nmodel : 9\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert tuning.processor() == f"AMD EPYC, cpu family 25, model {model}"


@pytest.mark.slow("compiles two artifacts; measurements, choices and files have fast tests")
def test_compile_with_tune(cli: Cli, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries are tuned, also that of a second partition of the CPU."""
    with_speeds(monkeypatch, {"caches": [[1.3]] * 4, "rows": [[1.3, 1.2]] * 4})
    outputs, hot = [tmp_path / "plain", tmp_path / "tuned"], tmp_path / "hot.json"
    hot.write_text(json.dumps({"0": list(range(0, 200, 3))}))
    avx2 = ["--quant", "f16", "--context", "64", "--target", "cpu-avx2", "--hot", hot, "--hot-device", "cpu"]
    for output, options in zip(outputs, ([], ["--tune"]), strict=True):
        assert cli("compile", tiny_model, "-o", output, *avx2, *options).code == 0
    whole, fast = (
        json.loads(cli("run", output, "-p", "Once upon", "-n", 12, "--json").out)["tokens"] for output in outputs
    )
    assert whole == fast
    report = json.loads((outputs[1] / "report.json").read_text())["tuning"]
    assert (report["isa"], report["processor"]) == ("x86-64-v3", tuning.processor())
    assert report["choice"] == {"caches_into_first_level": False, "row_bytes_ahead": 4096}
    trial = {"kernel": "caches", "choice": {"caches_into_first_level": False}, "speed": 1.3, "low": 1.3}
    assert report["trials"][1] == trial
    assert json.loads(cli("inspect", outputs[1], "--json").out)["tuning"] == report
    assert "caches into first level False" in " ".join(cli("inspect", outputs[1]).out.split())
    assert "tuning" not in json.loads((outputs[0] / "report.json").read_text())
    for library in ("host.so", "hot.x86-64-v3.so"):
        code = [(output / "kernels" / library).read_bytes() for output in outputs]
        assert code[0] != code[1], library


def test_tune_is_refused_for_another_machine(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    require("aarch64-linux-gnu-gcc")
    output = tmp_path / "artifact"
    ended = cli("compile", tiny_model, "-o", output, "--target", "cpu-arm64", "--tune")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "which cannot run code for cpu-arm64" in ended.err
    assert not output.exists()


@pytest.mark.slow("compiles and measures every kernel")
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is measured, as few times as that allows."""
    for name, value in (("_SECONDS", 0.0), ("_ROUNDS", 2), ("_WORKING_SET_BYTES", 2**24)):
        monkeypatch.setattr(tuning, name, value)
    found = tuned(ISA, 2, NoProgress())
    assert tuned(ISA, 2, NoProgress()) == found
    assert all(trial.low > 0.01 and trial.speed < 100 for trial in found.trials)
    assert 9 <= len(found.trials) <= 9 + 4 + 1


def test_code_that_this_machine_would_not_choose_stays(monkeypatch: pytest.MonkeyPatch, counted: list[str]) -> None:
    """And code with bfloat16 is tuned as that without it."""
    names = ["x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v3"]
    code = [Code(ISAS[name], f"{name}.so") for name in names]
    for first, changed in ((0, [True, True, False]), (1, [False, True, False]), (2, [False, False, True])):
        able = [ISAS[name] for name in names[first:]]
        monkeypatch.setattr("picompile.artifact.code.runs_here", lambda each, able=able: each[0].isa in able)
        found, tuning_ = tuned_code(code, NoProgress())
        assert tuning_.isa == ("x86-64-v3" if first == 2 else "x86-64-v4-vnni")
        assert [each.isa != known.isa for each, known in zip(found, code, strict=True)] == changed
        assert [each.file for each in found] == [each.file for each in code]
    monkeypatch.setattr("picompile.artifact.code.runs_here", lambda each: False)
    with pytest.raises(MachineError, match="cannot run code for x86-64-v4-bf16"):
        tuned_code(code, NoProgress())
