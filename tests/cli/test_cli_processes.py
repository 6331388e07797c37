"""Behaviour that only shows in a process of its own: imports, pipes, signals, terminals."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.products import sampled
from helpers.terminal import terminal

COMMAND = [sys.executable, "-m", "picompile"]
HEAVY = {
    "torch",
    "tvm",
    "tvm_ffi",
    "transformers",
    "safetensors",
    "picompile_passes.dialect",
    "picompile_codegen.specs",
}


def modules_after(*commands: str) -> tuple[list[int], set[str]]:
    """Exit codes of commands, and which of the heavy packages they loaded."""
    code = (
        "import sys\n"
        "from picompile.cli import main\n"
        "codes = [main(command.split(' ')) for command in sys.argv[1:]]\n"
        f"print(codes, *({HEAVY!r} & set(sys.modules)), sep=';', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    codes, *loaded = done.stderr.splitlines()[-1].split(";")
    return json.loads(codes), set(loaded)


def test_using_an_artifact_loads_no_compiler(tiny_artifact: Path) -> None:
    uses = ("run {} -p x -n 2", "run {} --ids 1,2 -n 2", "verify {}", "inspect {}", "inspect {} --json")
    commands = [use.format(tiny_artifact) for use in (*uses, "bench {} -p 4 -n 4 -r 1")]
    assert modules_after(*commands) == ([0] * 6, set())


def test_what_fails_early_loads_no_compiler() -> None:
    fine = ("--help", "--version", "targets")
    wrong = ("compile no-such-folder -o x", "compile / -o x --target h100", "eval x --text no-such-file")
    assert modules_after(*fine, *wrong) == ([0] * 3 + [2] * 3, set())


def test_start_up_is_short(tiny_artifact: Path) -> None:
    """CPU time, which other processes of a busy machine do not lengthen much. The bar is 0.6 s of a quiet one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*COMMAND, "run", tiny_artifact, "-p", "x", "-n", "1", "-t", "1"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.2


@pytest.mark.parametrize("module", ["picompile", "picompile_runtime"])
def test_peak_memory_of_run(tiny_artifact: Path, module: str) -> None:
    """At most the artifact, its KV cache and 150 MB. Of the process itself: what it was forked from does not count."""
    code = (
        "import atexit, pathlib, runpy, sys\n"
        "status = pathlib.Path('/proc/self/status').read_text\n"
        "atexit.register(lambda: print(status().split('VmHWM:')[1].split()[0], file=sys.stderr))\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    options = ["run", tiny_artifact] if module == "picompile" else [tiny_artifact]
    command = [sys.executable, "-c", code, *map(str, options), "-p", "one two three", "-n", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files = sum(path.stat().st_size for path in tiny_artifact.rglob("*") if path.is_file())
    cache = 2 * 2 * 2 * 64 * 24 * 2  # layers, key and value, heads, positions, dimensions, bytes
    assert done.stdout
    assert 1024 * int(done.stderr) <= files + cache + 150_000_000


@pytest.mark.parametrize(
    "words",
    [
        ("run", "ARTIFACT", "--ids", "1", "-n", "60"),
        ("plan", "--help"),
        ("plan", "--shape", "tiny-reglu", "--firing", "10%", "--target", "4090"),
    ],
)
def test_a_reader_that_goes_away_ends_it_quietly(tiny_artifact: Path, words: tuple[str, ...]) -> None:
    """rich, which prints the help and the plan, would end the process with 1."""
    command = [*COMMAND, *(str(tiny_artifact) if word == "ARTIFACT" else word for word in words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert errors == b""


@pytest.mark.slow("starts a process per signal", but=("15",))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_stop_ends_it_quietly(tiny_artifact: Path, number: signal.Signals) -> None:
    command, pipe = [*COMMAND, "bench", tiny_artifact, "-r", "1000000"], subprocess.PIPE
    # A process in the background of a script, or under `nohup`, ignores the signal, and so would its children.
    # A handler is not inherited: they start with what the signal does by default.
    handler = signal.signal(number, lambda *_: None)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        signal.signal(number, handler)
        try:
            # When the artifact is mapped, imports are through; earlier would be Python's own traceback.
            maps = Path(f"/proc/{process.pid}/maps")
            while process.poll() is None and str(tiny_artifact.resolve()) not in maps.read_text():
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(number)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, errors) == (128 + number, b"", b"")


def test_a_signal_that_is_ignored_stays_so(tiny_artifact: Path) -> None:
    """As `nohup` has it."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from picompile.cli.app import stoppable\n"
        "with stoppable() as came: os.kill(os.getpid(), signal.SIGHUP)\n"
        "sys.exit(7 + len(came))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


@sampled(
    slow="starts a process per case",
    closed=("<&- >&- 2>&-", "2>/dev/full", "<&-", ">&-", "2>&-"),
    ended=(("run {} --ids 1,2 -n 2", 0), ("inspect {}", 0), ("run {} -n 2", 2), ("verify /", 4)),
    fast={"closed": ("<&- >&- 2>&-", "2>/dev/full", ">&-")},
)
def test_closed_streams(tiny_artifact: Path, ended: tuple[str, int], closed: str) -> None:
    command, expected = ended
    words = f"{sys.executable} -m picompile {command.format(tiny_artifact)} {closed}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True)
    assert done.returncode == expected
    assert "internal" not in done.stderr and "Traceback" not in done.stderr


def test_standard_output_that_takes_nothing_is_named(tiny_artifact: Path) -> None:
    command = [*COMMAND, "inspect", tiny_artifact]
    # Unbuffered, it fails where it is written to, and nothing says that it was this.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (5, "error: No space left on device: standard output\n")


def test_too_few_file_descriptors_are_named(tiny_artifact: Path) -> None:
    """Also where the runtime says that a file of the artifact cannot be opened."""
    for most in (12, 16):
        words = f"ulimit -n {most}; exec {sys.executable} -m picompile verify {tiny_artifact}"
        done = subprocess.run(["sh", "-c", words], capture_output=True, text=True)
        assert (done.returncode, done.stderr.splitlines()) == (
            5,
            [f"error: too many open files: this process may have {most}; raise the limit with ulimit -n"],
        )


@pytest.mark.slow("starts two processes on terminals")
def test_progress_and_speed_show_on_a_terminal(tiny_artifact: Path) -> None:
    for words, text in (
        (("bench", tiny_artifact, "-p", "4", "-n", "4", "-r", "3"), "measure"),
        (("run", tiny_artifact, "-p", "x", "-n", "4"), "generated at"),
    ):
        with terminal(*words, stdout=Path(os.devnull)) as shown:
            assert shown.wait() == 0
        assert text in shown.shown
