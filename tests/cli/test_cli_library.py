"""Models by name: `chat`, `run` and `serve` of a model on the hub, and `list`, `pull` and `rm`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.fake_hub import FakeHub
from helpers.refusals import assert_refused
from helpers.support import BUNDLED_MODEL, ROOT, Cli, compile_for_test
from picompile.config import CompileOptions
from picompile.library import Library, store
from picompile.library.entry import Source, add_name, write_record

PROMPT = ["-p", "class Reader:", "-n", "8", "--json"]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "library"))
    return tmp_path / "library"


def test_an_empty_library(cli: Cli, library: Path) -> None:
    ended = cli("list")
    assert (ended.code, ended.err) == (0, "") and ended.out.startswith("no models yet")
    assert json.loads(cli("list", "--json").out) == []
    assert_refused(cli("rm", "a/b"), 2, "a/b: no compiled model has this name; there is none")


def test_list_and_rm(cli: Cli, library: Path, tiny_artifact: Path) -> None:
    library.mkdir()
    folder = library / "k"
    folder.symlink_to(tiny_artifact)
    downloaded = library / "model.gguf"
    downloaded.write_bytes(b"x" * 1000)
    write_record(folder, BUNDLED_MODEL, Source("a/b:Q4_K_M", False), CompileOptions(), "1" * 40, (downloaded,))
    ended = cli("list")
    assert ended.out.splitlines()[0].split() == ["NAME", "FORMAT", "CONTEXT", "SIZE", "LAST", "USED"]
    assert ended.out.splitlines()[1].split()[:3] == ["a/b:Q4_K_M", "f16", "64"] and "just now" in ended.out
    assert str(library) in ended.out.splitlines()[2]
    (entry,) = Library().entries()
    add_name(entry, "a/b")
    assert cli("list").out.splitlines()[2].split() == ["a/b"]
    assert_refused(cli("rm", "a/b:Q4_K_M", "a/c"), 2, "a/c: no compiled model has this name; there is a/b:Q4_K_M, a/b")
    assert cli("verify", "a/b:Q4_K_M").code == 0 and cli("inspect", "a/b:Q4_K_M").code == 0
    assert "1 kB of downloads for them lie in the hub's cache: rm --only-downloads removes them" in ended.out
    assert cli("rm", "a/b:Q4_K_M", "--only-downloads").out == "removed the downloads of a/b:Q4_K_M: 1 kB\n"
    assert not downloaded.exists() and folder.exists() and "downloads" not in cli("list").out
    ended = cli("rm", "a/b:Q4_K_M")
    assert (ended.code, ended.err) == (0, "") and ended.out.startswith("removed a/b:Q4_K_M, which is also a/b: ")
    assert (tiny_artifact / "manifest.json").exists() and json.loads(cli("list", "--json").out) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pull models/tiny", "is a path; pull takes the name of a model on the hub"),
        ("pull hf://a", "no name of a model"),
        ("chat qwen3 -p x", "qwen3: no such file or folder; a model on the hub is named ORG/REPO"),
        ("run nothing -p x", "nothing: no such file or folder"),
        ("bench nothing", "nothing: no such file or folder"),
        ("inspect nothing", "nothing: no such file or folder"),
        ("serve nothing", "nothing: no such file or folder"),
        ("serve", "give a model to serve, as in picompile serve ORG/REPO; none is compiled yet"),
        ("compile nothing -o made", "nothing: no such file or folder; MODEL is"),
        ("run models/tiny --context 0 -p x", "greater than or equal to 1"),
        ("run models/tiny --quant q99 -p x", "unknown"),
    ],
)
def test_what_is_refused_at_once(
    cli: Cli, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert_refused(cli(*words.split()), 2, says)
    assert not library.exists() and not (tmp_path / "made").exists()


class Commands:
    """The command line in processes of their own, with a hub and caches of their own."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub, self.environment = hub, hub.environment(folder)

    def start(self, *words: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "picompile", *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, cwd=ROOT, text=True, stdout=pipe, stderr=pipe)

    def __call__(self, *words: object, code: int = 0) -> tuple[str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, err
        return out, err

    def json(self, *words: object) -> Any:
        return json.loads(self(*words)[0])


@pytest.fixture
def commands_on_hub(tmp_path: Path) -> Iterator[Commands]:
    with FakeHub() as hub:
        hub.add_folder("me/tiny", BUNDLED_MODEL)
        yield Commands(hub, tmp_path)


@pytest.mark.slow("starts processes that compile a model")
def test_from_a_name_to_text(commands_on_hub: Commands, tmp_path: Path) -> None:
    """The text is that of the artifact which `compile` makes of the folder; the second time nothing is asked."""
    picompile, hub = commands_on_hub, commands_on_hub.hub
    out, err = picompile("run", "me/tiny", *PROMPT)
    assert err.splitlines()[0].startswith("downloading me/tiny: ")
    assert err.splitlines()[1].startswith("compiling me/tiny for this machine")
    compile_for_test(BUNDLED_MODEL, tmp_path / "artifact", target="native", sequences=4)
    assert json.loads(out)["tokens"] == picompile.json("run", tmp_path / "artifact", *PROMPT)["tokens"]
    asked = len(hub.requests)
    hub.is_down = True
    again = picompile.json("run", "hf://me/tiny", *PROMPT)
    assert again["tokens"] == json.loads(out)["tokens"] and len(hub.requests) == asked
    (entry,) = picompile.json("list", "--json")
    assert (entry["name"], entry["commit"]) == ("me/tiny", hub.repositories["me/tiny"].commit)
    assert json.loads(picompile("inspect", "me/tiny", "--json")[0])["model"]["name"] == "tiny"
    hub.is_down = False
    assert "compiling" not in picompile("pull", "me/tiny")[1]
    answer, err = picompile("chat", "me/tiny", "-p", "class Reader:", "-n", "4", "--temp", "0")
    assert answer.strip() and "compiling" not in err
    assert picompile.json("eval", "me/tiny", "--text", "SECURITY.md", "-n", "64", "--against", "me/tiny", "--json")
    assert picompile("rm", "me/tiny", "--downloads")[0].startswith("removed me/tiny: ")
    assert picompile("list")[0].startswith("no models yet")
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


@pytest.mark.slow("starts processes that compile a model")
def test_two_processes_compile_once(commands_on_hub: Commands) -> None:
    processes = [commands_on_hub.start("run", "me/tiny", *PROMPT) for _ in range(2)]
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    (first, _), (second, _) = ended
    assert json.loads(first)["tokens"] == json.loads(second)["tokens"]
    assert sum("compiling me/tiny" in err for _, err in ended) == 1
    assert sum("another picompile makes me/tiny; waiting for it" in err for _, err in ended) == 1


@pytest.mark.slow("starts a server, which compiles a model")
def test_serve_answers_under_the_name(commands_on_hub: Commands) -> None:
    process = commands_on_hub.start("serve", "me/tiny", "--port", "0", "--context", "64")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    url = next(line for line in lines if line.startswith("serving me/tiny at ")).split()[-1]
    try:
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["me/tiny"]
        body = {"model": "me/tiny", "prompt": "class Reader:", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["model"] == "me/tiny" and answer["choices"][0]["text"]
        assert "in use by another picompile" in commands_on_hub("rm", "me/tiny", code=2)[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow("starts a server, after models are compiled")
def test_serve_has_all_models_of_the_library(commands_on_hub: Commands) -> None:
    """Each is loaded when it is first asked for."""
    commands_on_hub.hub.add_folder("me/other", BUNDLED_MODEL)
    for name in ("me/tiny", "me/other"):
        commands_on_hub("pull", name)
    process = commands_on_hub.start("serve", "--port", "0")
    assert process.stderr is not None
    url = next(line for line in iter(process.stderr.readline, "") if line.startswith("serving ")).split()[-1]
    try:
        assert sorted(model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]) == ["me/other", "me/tiny"]
        for name in ("me/tiny", "me/other"):
            body = {"model": name, "prompt": "class Reader:", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            assert answer["model"] == name and answer["choices"][0]["text"]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert commands_on_hub("rm", "me/tiny")[0]


@pytest.mark.slow("starts processes, one of which plans")
def test_commands_on_checkpoints_take_names(commands_on_hub: Commands, tmp_path: Path) -> None:
    picompile, hub = commands_on_hub, commands_on_hub.hub
    words = ("me/tiny", "--target", "4090", "--json")
    plan = picompile.json("plan", *words, "--firing", "10%")
    assert plan == picompile.json("plan", *words, "--firing", "10%", "--activation", "relu", "--predictor", "learned")
    assert picompile.json("plan", *words, "--activation", "silu")["predictor"] == "none"
    assert plan["model"] == "tiny" and hub.downloads() == ["config.json"]
    out, _ = picompile("compile", "me/tiny", "-o", tmp_path / "artifact", "--target", "native")
    assert out.startswith(f"{tmp_path / 'artifact'}: tiny, ")
    picompile("profile", "me/tiny", "-o", tmp_path / "profile", "--tokens", "1024")
    assert (tmp_path / "profile" / "profile.json").exists()
    _, err = picompile("compile", "me/none", "-o", tmp_path / "no", code=2)
    assert "no such model at" in err and not (tmp_path / "no").exists()
