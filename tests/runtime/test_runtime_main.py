from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.toys.toy_artifact import make_toy
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime.__main__ import main
from picompile_runtime.artifact.manifest import sealed

ANSWER = "hello 🙂 world"


@pytest.fixture
def folder(make_artifact: Callable[..., Path]) -> Path:
    """Answers "Hi" with ANSWER, then goes on for long."""
    tokens = [*byte_level().encode(ANSWER), EOS]
    toy = make_toy(300, 2000, {1 + index: token for index, token in enumerate(tokens)})
    return make_artifact(toy=toy, context=2000, texts={"tokenizer.json": byte_level()._tokenizer.to_str()})


def test_text_goes_to_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "-p", "Hi", "--temp", "0", "-t", "1"]) == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", "")


def test_stop_and_number_of_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "-p", "Hi", "--temp", "0", "--stop", "zzz", "--stop", " w"]) == 0
    assert capsys.readouterr().out == "hello 🙂\n"
    assert main([str(folder), "-p", "Hi", "--temp", "0", "-n", "2"]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.01", "--seed", "1"]
    assert main([str(folder), "-p", "Hi", "--temp", "0.1", *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"text", "tokens", "prompt_tokens", "stats"}
    assert result["text"] == ANSWER
    assert result["tokens"] == [*byte_level().encode(ANSWER), EOS]
    assert result["prompt_tokens"] == byte_level().encode("Hi")
    assert result["stats"]["stop_reason"] == "eos"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "Hi", "--temp", "-1"], 2, "error: temperature must be 0 or more, not -1.0\n"),
        (["-p", "Hi", "-n", "0"], 2, "error: max_tokens must be 1 or more, not 0\n"),
        (["-p", "", "-n", "1"], 2, "error: the prompt is empty, and this model has no token that begins a text; "),
        (["-p", "x" * 2001], 2, "error: a prompt of 2001 tokens does not fit the context of 2000; shorten it\n"),
        (
            ["-p", "Hi", "-t", "1000"],
            2,
            "error: the number of threads must be a whole number from 1 to 256, not 1000\n",
        ),
    ],
)
def test_errors_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main([str(folder), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1


def test_exit_codes_of_broken_artifacts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder / "manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_bytes(sealed({**data, "code": [{**data["code"][0], "features": ["warp"]}]}))
    assert main([str(folder), "-p", "Hi"]) == 6
    assert main([str(folder / "kernels"), "-p", "Hi"]) == 4
    assert main([str(folder / "nothing"), "-p", "Hi"]) == 4
    assert capsys.readouterr().err.count("\n") == 3


def test_usage_errors_have_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(folder)], [str(folder), "-p", "Hi", "-n", "many"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()


def test_debug_shows_the_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "picompile_runtime", str(folder), "-p", "", "--debug"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "Traceback" in run.stderr and "RequestError" in run.stderr


@pytest.fixture
def endless(make_artifact: Callable[..., Path]) -> Iterator[subprocess.Popen[str]]:
    """A process that writes for minutes, and has written one character."""
    model = {"model": {"name": "toy", "eos_token_ids": []}}
    texts = {"tokenizer.json": byte_level()._tokenizer.to_str()}
    folder = make_artifact(toy=make_toy(300, 100_000), context=100_000, texts=texts, manifest=model)
    command = [sys.executable, "-m", "picompile_runtime", str(folder), "-p", "abc", "-n", "99000", "--seed", "1"]
    pipe = subprocess.PIPE
    # Children of a process that ignores the signal, as those in the background of a script do, would ignore it too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        signal.signal(signal.SIGINT, handler)
        assert process.stdout is not None and process.stdout.read(1)
        yield process
        process.kill()


def test_text_is_streamed(endless: subprocess.Popen[str]) -> None:
    assert endless.poll() is None


def test_interrupt_is_clean(endless: subprocess.Popen[str]) -> None:
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=60)
    assert (endless.returncode, err) == (130, "\n")


def test_a_closed_pipe_is_no_error(endless: subprocess.Popen[str]) -> None:
    assert endless.stdout is not None and endless.stderr is not None
    endless.stdout.close()
    assert endless.wait(timeout=60) == 141
    assert endless.stderr.read() == ""
