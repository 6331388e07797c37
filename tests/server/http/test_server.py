"""The server as a process: how it begins, what it says, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.serving_process import ServingProcess, serving
from picompile_server.main import main

LONG = {"prompt": "Hi", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}


def test_a_signal_lets_running_answers_come_to_their_end(serving_artifact: Path) -> None:
    with serving(f"--model=tiny={serving_artifact}") as server:
        body = {**LONG, "n": 4}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert server.ended() == 0
        assert rest[-1] == "data: [DONE]" and sum('"finish_reason":"length"' in line for line in rest) == 4
        assert not any("error" in line.lower() for line in server.lines)


@pytest.mark.slow("starts servers; one that ends as it should is fast", but=("one",))
@pytest.mark.parametrize(("options", "signals"), [(["--drain-timeout", 0], 1), ([], 2)], ids=["one", "two"])
def test_answers_that_take_too_long_are_cancelled_at_the_end(
    serving_artifact: Path, options: list[Any], signals: int
) -> None:
    """A second signal cancels at once what still runs."""
    with serving(serving_artifact, *options) as server:
        body = {**LONG, "n": 128, "max_tokens": 900}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for number in range(signals):
                time.sleep(0.2 * number)  # two at a time may be one
                server.process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert server.ended() == 0
        errors = [json.loads(line.partition(": ")[2]) for line in rest if '"error"' in line]
        assert [error["error"]["code"] for error in errors] == ["shutting_down"]
        assert server.lines[0].startswith("loading serving-artifact; ")
        assert not any("Traceback" in line for line in server.lines)


def test_what_is_said_at_the_beginning(server: ServingProcess) -> None:
    said = [line for line in server.lines if " POST /" not in line and " GET /" not in line]
    assert said[-1] == f"serving tiny at {server.url}"
    assert said[-2] == "tiny has no chat template: chats are written as a plain dialogue"


@pytest.mark.slow("starts two servers; test_access_log.py has the lines")
def test_requests_are_logged_unless_it_is_quiet(serving_artifact: Path) -> None:
    for options, count in (((), 1), (("--quiet",), 0)):
        with serving(serving_artifact, *options) as server:
            httpx.post(f"{server.url}/tokenize", json={"content": "a"}, timeout=60)
            server.process.send_signal(signal.SIGTERM)
            assert server.ended() == 0
            assert sum(" POST /tokenize 200 serving-artifact: " in line for line in server.lines) == count


def test_a_broken_artifact_ends_the_server_with_its_exit_code(serving_artifact: Path, tmp_path: Path) -> None:
    with serving(serving_artifact, f"--model=other={tmp_path}", wait=False) as server:
        assert server.ended() == 4
        assert [line for line in server.lines if line.startswith("error: ")] == server.lines[-1:]


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--kv-memory", "many"), ("--host", "no such host")):
        assert main(["x", option, value]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and option in error and error.count("\n") == 1


def test_a_port_that_is_taken(serving_artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(serving_artifact, "--port", port, wait=False) as server:
            assert server.ended() == 2
            (line,) = server.lines
            assert line.startswith("error: ") and str(port) in line and "--port" in line


def test_keys_and_addresses(serving_artifact: Path) -> None:
    with serving(serving_artifact, "--host", "0.0.0.0", PICOMPILE_API_KEY="") as server:
        assert server.lines[0].startswith("warning: everybody who reaches 0.0.0.0")
    options = ("--host", "0.0.0.0", "--kv-memory", "16MiB", "--max-waiting", 0, "--max-body", "1KB")
    with serving(serving_artifact, *options, PICOMPILE_API_KEY="secret") as server:
        assert not any(line.startswith("warning") for line in server.lines)
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        body = {"prompt": "x" * 2000}
        assert httpx.post(f"{url}/v1/completions", headers=headers, json=body).status_code == 413
        assert server.end() == 0


@pytest.mark.slow("starts a server again; one that is loaded is fast", but=("True",))
@pytest.mark.parametrize("is_loaded", [True, False])
def test_health_answers_before_the_model_is_there(serving_artifact: Path, is_loaded: bool) -> None:
    """A signal ends the server even if the model never comes; loading waits for a line of the test."""
    code = """
import sys, threading, time
from picompile_server.http import loader
load = loader.load_model
def slowly(*arguments, **named):
    sys.stdin.readline()
    return load(*arguments, **named)
loader.load_model = slowly
from picompile_server.main import main
sys.exit(main(sys.argv[1:]))
"""
    command, pipe = [sys.executable, "-c", code, str(serving_artifact), "--port", "0", "-t", "1"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdin is not None and process.stderr is not None
            url = process.stderr.readline().partition("; ")[2].partition("/health")[0]
            answer = httpx.get(f"{url}/health")
            assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
            error = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert error.status_code == 503 and error.json()["error"]["code"] == "loading"
            if is_loaded:
                process.stdin.write("\n")
                process.stdin.flush()
                while not process.stderr.readline().startswith("serving "):
                    pass
                assert httpx.get(f"{url}/health").json() == {"status": "ok"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.slow("starts a server of two models; test_demand.py has fake ones")
def test_models_take_turns_where_one_may_be_loaded(serving_artifact: Path) -> None:
    options = ("--model", f"one={serving_artifact}", "--model", f"two={serving_artifact}", "--max-loaded", 1)
    with serving(*options) as server:
        assert server.lines[0].startswith("loading models when they are asked for; ")
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        body = {"prompt": "Hi", "max_tokens": 3, "temperature": 0}
        texts = []
        for name in ("two", "one", "two"):
            answer = httpx.post(f"{server.url}/v1/completions", json={**body, "model": name}, timeout=60)
            texts.append(answer.json()["choices"][0]["text"])
            models = httpx.get(f"{server.url}/v1/models").json()["data"]
            assert {model["id"] for model in models if model["status"]["value"] == "loaded"} == {name}
        assert len(set(texts)) == 1
        said = [line.split(maxsplit=1)[1] for line in server.lines if "loaded " in line]
        assert said == [
            *("loaded two", "unloaded two (to make room)", "loaded one", "unloaded one (to make room)", "loaded two")
        ]
        assert server.end() == 0


@pytest.mark.slow("starts servers of two models")
@pytest.mark.parametrize(("memory", "at_start"), [("1GiB", True), ("1MB", False)])
def test_models_that_do_not_fit_together_are_loaded_on_demand(
    serving_artifact: Path, memory: str, at_start: bool
) -> None:
    options = ("--model", f"one={serving_artifact}", "--model", f"two={serving_artifact}", "--model-memory", memory)
    with serving(*options) as server:
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [model["status"]["value"] == "loaded" for model in models] == [at_start] * 2
