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
from picompile_runtime import RequestError
from picompile_runtime.__main__ import main

ANSWER = "hello 🙂 world"


@pytest.fixture
def folder(make_artifact: Callable[..., Path]) -> Path:
    """Answers "Hi" with ANSWER, then goes on for long."""
    tokens = [*byte_level().encode(ANSWER), EOS]
    toy = make_toy(300, 2000, {1 + index: token for index, token in enumerate(tokens)})
    return make_artifact(toy=toy, context=2000, texts={"tokenizer.json": byte_level()._tokenizer.to_str()})


def test_stop_and_number_of_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, text in (([], ANSWER), (["--stop", "zzz", "--stop", " w"], "hello 🙂"), (["-n", "2"], "hello")):
        assert main([str(folder), "-p", "Hi", "--temp", "0", *options]) == 0
        assert capsys.readouterr() == (f"{text}\n", "")


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.01", "--seed", "1"]
    assert main([str(folder), "-p", "Hi", "--temp", "0.1", *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"text", "tokens", "prompt_tokens", "stats"}
    assert result["text"] == ANSWER
    assert result["tokens"] == [*byte_level().encode(ANSWER), EOS]
    assert result["prompt_tokens"] == byte_level().encode("Hi")
    assert result["stats"]["stop_reason"] == "eos"


def test_errors_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, *options, says in (
        ("", "-p", "Hi", "--temp", "-1", "temperature must be 0 or more, not -1.0\n"),
        ("", "-p", "Hi", "-n", "0", "max_tokens must be 1 or more, not 0\n"),
        ("", "-p", "", "-n", "1", "the prompt is empty, and this model has no token that begins a text; "),
        ("", "-p", "x" * 2001, "a prompt of 2001 tokens does not fit the context of 2000; shorten it\n"),
        ("", "-p", "Hi", "-t", "1000", "the number of threads must be a whole number from 1 to 256, not 1000\n"),
        ("kernels", "-p", "Hi", str(folder / "kernels")),
        ("nothing", "-p", "Hi", str(folder / "nothing")),
    ):
        assert main([str(folder / name), *options]) == (4 if name else 2)
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: {says}") and err.count("\n") == 1
    for arguments in ([], [str(folder)], [str(folder), "-p", "Hi", "-n", "many"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()
    with pytest.raises(RequestError):
        main([str(folder), "-p", "", "--debug"])


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


def test_text_is_streamed_and_an_interrupt_is_clean(endless: subprocess.Popen[str]) -> None:
    assert endless.poll() is None
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=60)
    assert (endless.returncode, err) == (130, "\n")


def test_a_closed_pipe_is_no_error(endless: subprocess.Popen[str]) -> None:
    assert endless.stdout is not None and endless.stderr is not None
    endless.stdout.close()
    assert endless.wait(timeout=60) == 141
    assert endless.stderr.read() == ""


def test_import_is_quick_and_imports_no_compiler() -> None:
    """In processor time, since other tests may be running."""
    script = """
import sys, time
start = time.process_time()
import picompile_runtime
seconds = time.process_time() - start
heavy = {"torch", "tvm", "tvm_ffi", "transformers", "tokenizers", "jinja2", "picompile"} & set(sys.modules)
heavy |= {name for name in sys.modules if "picompile_runtime.devices.cuda" in name}
sys.exit(f"{heavy}, {seconds} s" if heavy or seconds > 0.5 else 0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
