"""Rules for every command: help, usage errors, exit codes, and one line of text for each error."""

import errno
import inspect
import io
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import picompile
from helpers.refusals import assert_refused
from helpers.support import BUNDLED_MODEL, Cli
from picompile.cli.app import COMMANDS, report
from picompile.cli.chat import CHAT_OPTIONS
from picompile.cli.options import takes_options
from picompile.cli.run import read_prompt, run_command
from picompile.errors import DoesNotFitError, UsageError
from picompile_runtime.__main__ import _parser
from picompile_runtime.run_options import RUN_OPTIONS, SAMPLING
from picompile_runtime.sampling.model_defaults import FIELDS
from picompile_runtime.sampling.sampler import SamplingParams


def test_every_command_explains_itself(cli: Cli) -> None:
    ended = cli()
    assert ended.code == 0 and all(command in ended.out for command in COMMANDS)
    for command in COMMANDS:
        ended = cli(command, "--help")
        assert (ended.code, ended.err) == (0, "")
        assert f"picompile {command}" in ended.out and "Example" in ended.out
    assert cli("run", "-h").out == cli("run", "--help").out


def test_version(cli: Cli) -> None:
    ended = cli("--version")
    assert ended.code == 0
    assert ended.out.startswith(f"picompile {picompile.__version__} ")


USAGE_ERRORS = {
    "frobnicate": "frobnicate",
    "run x --frobnicate": "--frobnicate",
    "run": "MODEL",
    "run x": "-p",
    "run x -p a --ids 1": "--ids",
    "run x --ids 1,-2": "1,-2",
    "run x -p a -n 0": "-n",
    "run x -p a -t 0": "-t",
    "run x -p a --temp -0.5": "--temp",
    "run x -p a --temp nan": "temp",
    "run x -p a --top-p 1.5": "--top-p",
    "run x -p a --seed -1": "--seed",
    "run x -f no/such/file": "no/such/file",
    "bench x -p -512": "-p",
    "bench x --text no/such/file": "no/such/file",
    "eval x": "--text",
    "eval x --text no/such/file": "no/such/file",
    "eval x --text /": "folder",
    "compile x": "-o",
    "compile x -o y --quant q9": "q9",
    f"compile {BUNDLED_MODEL} -o y --predictor guessed": "guessed",
    "compile x -o y --kv-dtype q5": "q5",
    "compile x -o y --context 0": "--context",
    "compile x -o y --target 4090,4080": "an artifact is for one GPU",
    "compile x -o y --target local": "this machine's processor is native",
    "compile x -o y --target 9999": "unknown target",
    "compile x -o y --target cpu,,cpu-arm64": "unknown target ''",
    "synth -o y": "--shape",
    "synth --shape nosuch -o y": "nosuch",
    "synth --shape tiny-reglu -o y --active 0": "--active",
    "synth --shape tiny-reglu -o y --active nan": "--active",
    "synth --shape tiny-reglu -o y --seed -1": "--seed",
    "synth --shape tiny-reglu -o y --rank -1": "--rank",
}


def test_usage_errors(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, says in USAGE_ERRORS.items():
        assert_refused(cli(*command.split()), 2, says)
        assert list(tmp_path.iterdir()) == []
    assert cli("run", "x", "--ids", "").err.count("--ids") == 1


def test_stdin_that_is_not_text_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    with pytest.raises(UsageError, match="byte 3"):
        read_prompt("-", None, None)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("no\nsecond line"), 2, "error: no\n"),
        (DoesNotFitError("needs 2 GB, 1 GB free"), 5, "error: needs 2 GB, 1 GB free\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 5, "error: No space left on device\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "error: /x: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (typer.Exit(0), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
        (typer.BadParameter("bad\n  thing"), 2, "error: Invalid value: bad thing\n"),
        (MemoryError(), 5, "error: out of memory"),
        (ZeroDivisionError("zero"), 1, "error: internal error: ZeroDivisionError: zero; run with --debug for the tr"),
    ],
)
def test_exit_codes_and_texts_of_errors(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error, debug=False) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(text) and bool(captured.err) == bool(text)


def test_debug_adds_the_traceback(cli: Cli) -> None:
    ended = cli("run", "x", "--ids", "?", "--debug")
    assert ended.code == 2 and "Traceback (most recent call last)" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: ")


# OpenAI's API has them.
ONLY_SERVED = {"presence_penalty", "frequency_penalty", "logit_bias"}


def test_defaults_are_those_of_the_sampler() -> None:
    declared = {key: option.default for key, option in RUN_OPTIONS.items()}
    # The temperature is not of the model, so that texts of two runs can be compared.
    assert {key for key, option in RUN_OPTIONS.items() if option.of_model} == {*FIELDS} - {"temperature"}
    # Command lines take the likeliest token unless they are told to draw.
    sampler = SamplingParams(temperature=0.0)
    names = {field.name for field in fields(sampler)} - ONLY_SERVED
    assert names == set(SAMPLING)
    assert {name: getattr(sampler, name) for name in names} == {name: declared[name] for name in names}
    # `chat` draws, with the defaults that `serve` has.
    assert SamplingParams(**{name: CHAT_OPTIONS[name].default for name in SAMPLING}) == SamplingParams()
    assert {key for key, option in CHAT_OPTIONS.items() if option.of_model} == {*FIELDS}


def test_both_command_lines_take_every_option() -> None:
    parsed = vars(_parser().parse_args(["artifact", "-p", "text"]))
    command = inspect.signature(takes_options(run_command)).parameters
    for key, option in RUN_OPTIONS.items():
        assert parsed[key] == ([] if option.repeated else option.unset)
        assert key in command
