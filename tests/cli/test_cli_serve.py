"""`picompile serve` and `picompile-serve`: the same options, one line for each error, a clean end."""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from helpers.support import Cli
from picompile.cli.options import takes_options
from picompile.cli.serve import serve_command
from picompile_runtime import RequestError
from picompile_server.declared import SERVE_OPTIONS
from picompile_server.main import _parser
from picompile_server.options import ServeOptions, parse_duration, parse_size, serve_options

pytestmark = pytest.mark.slow("starts servers in processes of their own; what they call has fast tests")


def test_both_command_lines_take_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = vars(_parser().parse_args(["build/tiny"]))
    parameters = inspect.signature(takes_options(serve_command)).parameters
    for key, option in SERVE_OPTIONS.items():
        unset = [] if option.repeated else False if option.kind is bool else option.default
        assert parsed[key] == unset
        assert parameters[key].default == (parsed[key] or None if option.repeated else parsed[key])
    assert set(parameters) == {"source", "context", "quant", "help_all", *SERVE_OPTIONS}
    monkeypatch.delenv("PICOMPILE_API_KEY", raising=False)
    assert serve_options("build/tiny", parsed) == ServeOptions({"tiny": Path("build/tiny")})


def test_what_options_mean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PICOMPILE_API_KEY", "third")
    keys = tmp_path / "keys"
    keys.write_text("\nfirst\n  second \n")
    words = [
        *("--model", "a=x/y", "--model", "b=z=1", "--api-key", "zeroth", "--api-key-file", str(keys)),
        *("--kv-memory", "1.5GiB", "--max-body", "2MB", "--no-reread", "--drain-timeout", "1.5", "--cors", "http://a"),
        *("--allowed-host", "me", "-t", "3", "--replan", "--max-waiting", "4", "--host", "::", "--port", "0"),
        *("--load", "demand", "--max-loaded", "2", "--model-memory", "4GiB", "--keep-alive", "5m", "--quiet"),
    ]
    assert serve_options(None, vars(_parser().parse_args(words))) == ServeOptions(
        models={"a": Path("x/y"), "b": Path("z=1")},
        host="::",
        port=0,
        keys=("zeroth", "first", "second", "third"),
        load="demand",
        most_loaded=2,
        model_bytes=2**32,
        threads=3,
        replan=True,
        max_waiting=4,
        kv_bytes=3 * 2**29,
        reread=False,
        most_body_bytes=2_000_000,
        origins=("http://a",),
        hosts=("me",),
        drain_s=1.5,
        keep_s=300.0,
        is_quiet=True,
    )


def test_sizes() -> None:
    for text, size in (("1", 1), ("1k", 1000), ("1KiB", 1024), ("0.5 MiB", 2**19), ("2gb", 2 * 10**9)):
        assert parse_size(text, "--max-body") == size
    for text in ("", "0", "-1", "1.2.3", "1e9", "MiB", "1 X", "1KiBB", "nan", "²"):
        with pytest.raises(RequestError, match="--max-body takes a size such as 512MiB"):
            parse_size(text, "--max-body")


def test_durations() -> None:
    for text, duration_s in (("90", 90), ("30s", 30), ("0.5 m", 30), ("2H", 7200)):
        assert parse_duration(text, "--keep-alive") == duration_s
    for text in ("", "0", "-1", "5 min", "1e9", "m", "nan", "²s"):
        with pytest.raises(RequestError, match="--keep-alive takes a time such as 90s, 5m or 1h"):
            parse_duration(text, "--keep-alive")


def test_options_that_make_no_sense() -> None:
    for words, message in (
        ([], "give an artifact to serve"),
        (["--model", "=x"], "--model takes NAME=ARTIFACT"),
        (["a", "--model", "a=b"], "two models have the name 'a'"),
        (["a", "--load", "never"], "--load takes start, demand or auto, not 'never'"),
        (["a", "--load", "start", "--max-loaded", "1"], "give --load demand"),
        (["a", "--api-key", "two words"], "an API key must be of visible ASCII"),
        (["a", "--api-key-file", "nothing/there"], "--api-key-file: nothing/there cannot be read"),
        (["a", "--api-key-file", "/dev/null"], "has no key; write one on each line"),
    ):
        options = vars(_parser().parse_args(words))
        with pytest.raises(RequestError, match=re.escape(message)):
            serve_options(options["artifact"], options)


def test_numbers_out_of_bounds_are_usage_errors(cli: Cli) -> None:
    for words in (["--port", "70000"], ["--port", "x"], ["--max-waiting", "-1"], ["--drain-timeout", "-1"]):
        assert cli("serve", "artifact", *words).code == 2
        with pytest.raises(SystemExit) as caught:
            _parser().parse_args(["artifact", *words])
        assert caught.value.code == 2


def test_a_broken_artifact_is_one_line(cli: Cli, tmp_path: Path) -> None:
    ended = cli("serve", tmp_path, "--port", 0)
    assert ended.code == 4 and ended.out == ""
    loading, error = ended.err.splitlines()
    assert loading.startswith(f"loading {tmp_path.name}; http://127.0.0.1:") and error.startswith("error: ")


def test_the_command_serves_until_a_signal(tiny_artifact: Path) -> None:
    # Not by the server of commands: a signal would only reach its client.
    command = [sys.executable, "-m", "picompile", "serve", str(tiny_artifact), "--port", "0", "-t", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).startswith("serving "):
                assert line, "the server ended"
            address = re.fullmatch(r"serving tiny-artifact at (http://127\.0\.0\.1:\d+)\n", line)
            assert address is not None
            body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
            made = httpx.post(f"{address[1]}/v1/completions", json=body)
            assert made.status_code == 200 and made.json()["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
