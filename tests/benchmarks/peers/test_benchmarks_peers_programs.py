"""benchmarks.peers and programs that somebody has built: scripts print what llama-bench and PowerInfer's main do."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.outputs import OutputError, llama_bench_reading, llama_bench_rows, printed_timings_reading
from benchmarks.peers.__main__ import _arguments
from benchmarks.peers.contender import Program, prepare
from benchmarks.peers.engines import ENGINES, PROGRAMS, SWEEPS, Task
from benchmarks.peers.files import Files, LeftOutError
from benchmarks.peers.plan import Contender, Model, Scale, groups

DECODE, PREFILL = Task("decode", 2, 128, 32), Task("prefill", 2, 512, 0)
ROW = {"build_commit": "0123abc", "cpu_info": "a CPU", "n_prompt": 0, "n_gen": 32, "avg_ts": 43.5, "stddev_ts": 0.0}
TIMES = """
llama_print_timings:        load time =     123.45 ms
llama_print_timings:      sample time =       5.52 ms /    33 runs   (    0.17 ms per token,  5978.26 tokens per second)
llama_print_timings: prompt eval time =    2000.00 ms /   128 tokens (   15.63 ms per token,    64.00 tokens per second)
llama_print_timings:        eval time =     800.00 ms /    32 runs   (   25.00 ms per token,    40.00 tokens per second)
llama_print_timings:       total time =    2845.43 ms
"""


def script(folder: Path, stdout: str = "", stderr: str = "", code: int = 0) -> Path:
    """A program that prints, and keeps its arguments in a file."""
    path = folder / "program"
    lines = [
        f"#!{sys.executable}", "import sys", f"open({str(folder / 'arguments')!r}, 'w').write(' '.join(sys.argv[1:]))",
        f"sys.stdout.write({stdout!r})", f"sys.stderr.write({stderr!r})", f"sys.exit({code})",
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("text", [json.dumps([ROW]), f"loading\n{json.dumps(ROW)}\n", json.dumps([ROW], indent=2)])
def test_rows_are_read_as_json_and_as_lines(text: str) -> None:
    reading = llama_bench_reading(text, is_prompt=False)
    assert (reading.tokens_per_s, reading.system) == (43.5, "build 0123abc, a CPU")


def test_a_row_that_is_cut_off_is_none() -> None:
    assert llama_bench_rows(f"{json.dumps(ROW)}\n{json.dumps(ROW)[:30]}") == [ROW]


@pytest.mark.parametrize(
    "text", ["", "| model | t/s |", "[1, 2]", json.dumps([ROW, ROW]), json.dumps([ROW | {"avg_ts": "fast"}]), "null"]
)
def test_an_unknown_output_of_llama_bench_is_one_line(text: str) -> None:
    with pytest.raises(OutputError, match=r"^\d rows of llama-bench with a speed, not one, in '[^\n]*'…?$"):
        llama_bench_reading(text, is_prompt=False)


def test_a_row_of_another_test_is_refused() -> None:
    with pytest.raises(OutputError, match="has generated tokens"):
        llama_bench_reading(json.dumps([ROW]), is_prompt=True)


def test_printed_times_are_read() -> None:
    assert printed_timings_reading(TIMES, is_prompt=False).tokens_per_s == 40.0
    assert printed_timings_reading(TIMES, is_prompt=True).tokens_per_s == 64.0
    said = "system_info: n_threads = 2 / 2 | AVX = 1 | AVX2 = 1 | \n" + TIMES
    assert printed_timings_reading(said, is_prompt=True).system == "n_threads = 2 / 2 | AVX = 1 | AVX2 = 1"


@pytest.mark.parametrize("text", ["", "t" * 500, TIMES.replace("800.00", "0.00").replace("2000.00", "0.00")])
@pytest.mark.parametrize("is_prompt", [False, True])
def test_unknown_times_are_one_line(text: str, is_prompt: bool) -> None:
    with pytest.raises(OutputError, match=r"^no line '(prompt )?eval time") as caught:
        printed_timings_reading(text, is_prompt)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "printed", "task", "seconds", "asked"),
    [
        ("llama-bench", {"stdout": json.dumps([ROW])}, DECODE, 32 / 43.5, "-p 0 -n 32 -d 128 -t 2"),
        ("ik_llama.cpp", {"stdout": json.dumps([ROW])}, DECODE, 32 / 43.5, "-p 0 -n 0 -gp 128,32 -t 2"),
        ("llama-bench", {"stdout": json.dumps([ROW | {"n_gen": 0}])}, PREFILL, 512 / 43.5, "-p 512 -n 0 -t 2"),
        ("PowerInfer", {"stdout": " a text", "stderr": TIMES}, DECODE, 32 / 40, "-c 161 -n 33 -t 2 --ignore-eos"),
        ("PowerInfer", {"stderr": TIMES}, PREFILL, 512 / 64, "-c 513 -n 1 -t 2"),
    ],
)
def test_a_program_is_measured(
    tmp_path: Path, name: str, printed: dict[str, str], task: Task, seconds: float, asked: str
) -> None:
    program = Program(ENGINES[name], script(tmp_path, **printed), tmp_path / "model.gguf")
    assert program.measure(task)["seconds"] == pytest.approx(seconds)
    assert f"-m {tmp_path}/model.gguf {asked}" in (tmp_path / "arguments").read_text()
    assert name in program.about["version"]


@pytest.mark.parametrize(
    ("printed", "task", "why"),
    [
        ({"stdout": "no table"}, DECODE, r"program: 0 rows of llama-bench"),
        ({"stderr": "loading\nno such model", "code": 3}, DECODE, r"program ended with 3: no such model$"),
        ({"stdout": json.dumps([ROW])}, Task("decode", 2, 128, 16, 4), "several sequences are not measured"),
    ],
)
def test_a_program_that_cannot_be_measured_is_left_out(
    tmp_path: Path, printed: dict[str, str], task: Task, why: str
) -> None:
    with pytest.raises(LeftOutError, match=why) as caught:
        Program(ENGINES["llama-bench"], script(tmp_path, **printed), tmp_path / "model.gguf").measure(task)
    assert "\n" not in str(caught.value)


def test_a_program_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(LeftOutError, match=r"No such file or directory$"):
        Program(ENGINES["PowerInfer"], tmp_path / "main", tmp_path / "model.gguf").measure(DECODE)
    with pytest.raises(LeftOutError, match="name a built program: --program PowerInfer=PATH"):
        prepare(Contender("PowerInfer", "q4_0"), Model("reglu-1.3b", 0.1), Files(tmp_path, "native", sys.executable))


def test_programs_are_named_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path)
    monkeypatch.setattr(sys, "argv", ["peers", "--program", f"PowerInfer={path}"])
    assert _arguments().program == [("PowerInfer", path)]
    for text, why in ((f"other={path}", "is none of"), ("PowerInfer=/nowhere", "/nowhere is not a program")):
        monkeypatch.setattr(sys, "argv", ["peers", "--program", text])
        with pytest.raises(SystemExit):
            _arguments()
        assert why in capsys.readouterr().err.splitlines()[-1]


def test_each_engine_takes_part_in_its_sweeps() -> None:
    """Decode and prefill have all formats of an engine, other sweeps the nearest one."""
    assert set(PROGRAMS) == {"llama-bench", "ik_llama.cpp", "PowerInfer"}
    for group in groups(Scale(quick=True), SWEEPS):
        labels = [contender.label for contender in group.contenders]
        found = {contender.engine for contender in group.contenders}
        assert found == {
            name for name, engine in ENGINES.items() if group.sweep in engine.sweeps and group.format in engine.formats
        }
        assert len(labels) == len(set(labels)) and labels[0] == f"picompile {group.format} learned"
        assert ("torch float16" in labels) == (group.format == "f16" and group.sweep in ("decode", "prefill"))
