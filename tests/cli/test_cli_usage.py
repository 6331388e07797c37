"""Rules for every command: help, usage errors, exit codes, and one line of text for each error."""

import errno
import re
from pathlib import Path

import pytest
import typer

import picompile
from helpers.support import BUNDLED_MODEL, ROOT, Cli
from picompile.cli.app import COMMANDS, report
from picompile.cli.options import KvDtype, Quant
from picompile.errors import DoesNotFitError, UsageError


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_explains_itself(cli: Cli, command: str, option: str) -> None:
    ended = cli(command, option)
    assert (ended.code, ended.err) == (0, "")
    assert f"picompile {command}" in ended.out
    assert "Example" in ended.out
    assert "--debug" in ended.out


def test_without_a_command_help_is_shown(cli: Cli) -> None:
    ended = cli()
    assert ended.code == 0
    assert all(command in ended.out for command in COMMANDS)


def test_version(cli: Cli) -> None:
    ended = cli("--version")
    assert ended.code == 0
    assert ended.out.startswith(f"picompile {picompile.__version__} ")


def test_version_is_that_of_the_distribution() -> None:
    # Both pyproject files read this one.
    text = (ROOT / "runtime" / "picompile_runtime" / "version.py").read_text()
    versions = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert versions == [picompile.__version__]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "frobnicate"),
        (["run", "x", "--frobnicate"], "--frobnicate"),
        (["run", "x"], "-p"),
        (["run", "x", "-p", "a", "--ids", "1"], "--ids"),
        (["run", "x", "--ids", "1,-2"], "1,-2"),
        (["run", "x", "--ids", ""], "--ids"),
        (["run", "x", "-p", "a", "-n", "-1"], "-n"),
        (["run", "x", "-p", "a", "-n", "0"], "-n"),
        (["run", "x", "-p", "a", "-n", "many"], "-n"),
        (["run", "x", "-p", "a", "-t", "0"], "-t"),
        (["run", "x", "-p", "a", "-t", "-2"], "-t"),
        (["run", "x", "-p", "a", "--temp", "-0.5"], "--temp"),
        (["run", "x", "-p", "a", "--temp", "nan"], "temp"),
        (["run", "x", "-p", "a", "--top-k", "-1"], "--top-k"),
        (["run", "x", "-p", "a", "--top-p", "1.5"], "--top-p"),
        (["run", "x", "-p", "a", "--min-p", "-1"], "--min-p"),
        (["run", "x", "-p", "a", "--repetition-penalty", "-1"], "--repetition-penalty"),
        (["run", "x", "-p", "a", "--seed", "-1"], "--seed"),
        (["run", "x", "-f", "no/such/file"], "no/such/file"),
        (["run"], "ARTIFACT"),
        (["bench", "x", "-p", "-512"], "-p"),
        (["bench", "x", "-n", "0"], "-n"),
        (["bench", "x", "-r", "0"], "-r"),
        (["bench", "x", "--text", "no/such/file"], "no/such/file"),
        (["eval", "x"], "--text"),
        (["eval", "x", "--text", "no/such/file"], "no/such/file"),
        (["eval", "x", "--text", "/"], "folder"),
        (["compile", "x"], "-o"),
        (["compile", "x", "-o", "y", "--quant", "q5"], "q5"),
        (["compile", str(BUNDLED_MODEL), "-o", "y", "--predictor", "guessed"], "guessed"),
        (["compile", "x", "-o", "y", "--kv-dtype", "q5"], "q5"),
        (["compile", "x", "-o", "y", "--context", "-4"], "--context"),
        (["compile", "x", "-o", "y", "--context", "0"], "--context"),
        (["compile", "x", "-o", "y", "--target", "4090,4080"], "an artifact is for one GPU"),
        (["compile", "x", "-o", "y", "--target", "local"], "this machine's processor is native"),
        (["compile", "x", "-o", "y", "--target", "9999"], "unknown target"),
        (["compile", "x", "-o", "y", "--target", "cpu,,cpu-arm64"], "unknown target ''"),
        (["synth", "-o", "y"], "--shape"),
        (["synth", "--shape", "nosuch", "-o", "y"], "nosuch"),
        (["synth", "--shape", "tiny-reglu", "-o", "y", "--active", "0"], "--active"),
        (["synth", "--shape", "tiny-reglu", "-o", "y", "--active", "1.5"], "--active"),
        (["synth", "--shape", "tiny-reglu", "-o", "y", "--active", "nan"], "--active"),
        (["synth", "--shape", "tiny-reglu", "-o", "y", "--seed", "-1"], "--seed"),
        (["synth", "--shape", "tiny-reglu", "-o", "y", "--rank", "-1"], "--rank"),
    ],
    ids=" ".join,
)
def test_usage_errors(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert says in ended.err
    assert list(tmp_path.iterdir()) == []


def test_stdin_that_is_not_text_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from picompile.cli.run import read_prompt

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    with pytest.raises(UsageError, match="byte 3"):
        read_prompt("-", None, None)


def test_choices_are_those_of_the_packages() -> None:
    from picompile.choices import KV_DTYPES
    from picompile_passes.dialect import FORMATS

    assert {item.value for item in Quant} == set(FORMATS)
    assert {item.value for item in KvDtype} == set(KV_DTYPES)


def end(error: BaseException, capsys: pytest.CaptureFixture[str], *, debug: bool = False) -> tuple[int, str]:
    code = report(error, debug=debug)
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


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
        (typer.BadParameter("bad\n  thing"), 2, "error: Invalid value: bad thing\n"),
    ],
)
def test_exit_codes_and_texts_of_errors(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(error, capsys) == (code, text)


def test_out_of_memory_ends_as_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = end(MemoryError(), capsys)
    assert code == 5
    assert text.startswith("error: out of memory")


def test_internal_errors_are_called_internal(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = end(ZeroDivisionError("division by zero"), capsys)
    assert code == 1
    assert text == "error: internal error: ZeroDivisionError: division by zero; run with --debug for the traceback\n"


def test_debug_adds_the_traceback(cli: Cli) -> None:
    ended = cli("run", "x", "--ids", "?", "--debug")
    assert ended.code == 2
    assert "Traceback (most recent call last)" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: ")


def test_passes_are_listed_with_their_options(cli: Cli) -> None:
    import json

    ended = cli("passes", "--json")
    assert ended.code == 0
    rows = {row["name"]: row for row in json.loads(ended.out)}
    assert {"insert-predictors", "partition", "quantize"} <= set(rows)
    assert rows["quantize"]["ensures"] == "quantized"
    assert rows["insert-predictors"]["options"]["kind"] == "str"
    assert rows["insert-predictors"]["options"]["ranks"] == "Mapping[int, int]"
    text = cli("passes").out
    assert all(row["summary"] and row["summary"] in text for row in rows.values())
