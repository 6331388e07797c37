"""docs/serving.md is true: its commands and its Python run in their order, against the servers that it starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from helpers.documented_models import hub_of_documents
from helpers.proxies import free_port
from helpers.support import BUNDLED_MODEL, ROOT

GUIDE = ROOT / "docs" / "serving.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "127.0.0.1:8080"
PATIENCE_S = 120

# How commands begin that are not run here, and why.
EXEMPT = {
    "picompile-serve /srv/artifact --port 8081": "test_proxies.py starts the replicas",
    "picompile-serve /srv/artifact --port 8082": "test_proxies.py starts the replicas",
    "cp deploy/nginx.conf ": "test_proxies.py runs nginx, where it is installed",
    "SITE=chat.example.com caddy run ": "test_proxies.py runs Caddy, where it is installed",
    "cd examples/ray_serve && serve run ": "test_ray_serve.py runs it, where Ray Serve is installed",
    "docker build ": "no builder here; see test_containers.py",
    "docker run ": "no builder here; see test_containers.py",
    "ARTIFACT=/srv/artifact docker compose ": "no builder here; see test_containers.py",
    "pip install 'lm-eval[api]==0.4.13' transformers": "downloads packages",
    "picompile serve build/smollm2": "needs a file of 93 MB",
    "lm_eval --model local-completions ": "test_lm_eval.py runs it with another model, where lm-eval is installed",
}


def steps() -> Iterator[tuple[str, str]]:
    """Yield each command and each block of Python of the guide, with its kind."""
    for kind, block in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if kind == "python":
            yield kind, block
        else:
            yield from ((kind, line.removeprefix("$ ")) for line in block.splitlines())


def test_what_is_not_run_is_in_the_guide() -> None:
    for beginning in EXEMPT:
        assert len([text for _, text in steps() if text.startswith(beginning)]) == 1, beginning


@pytest.mark.slow("runs every command of the guide, servers too")
def test_the_guide(tmp_path: Path, commands: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    for name in ("models", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert BUNDLED_MODEL.parent == ROOT / "models"
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    with hub_of_documents(tmp_path) as hub, ExitStack() as stack:
        environment = hub.environment(tmp_path, PATH=path, PICOMPILE_TARGET="native")
        place = PORT
        for kind, text in steps():
            if text.startswith(tuple(EXEMPT)):
                continue
            if text.startswith("picompile compile "):
                # `huggingface_hub` reads its environment when it is imported, which the server of commands has done.
                command = f"{sys.executable} -m {text}"
                subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True, timeout=PATIENCE_S)
            elif "picompile serve " in text:
                stack.close()
                place = stack.enter_context(server(text, tmp_path, environment))
            else:
                words = [sys.executable, "-c", text] if kind == "python" else ["bash", "-c", text]
                run([word.replace(PORT, place) for word in words], tmp_path, environment)


def run(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command, which must succeed, print something that is no error, and say nothing on stderr."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, ""), f"{words}\n{done.stdout}{done.stderr}"
    assert done.stdout.strip() and '"error"' not in done.stdout, f"{words}\n{done.stdout}"


@contextmanager
def server(command: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Start the server that a command of the guide starts, at a port of its own; yield its address without http://.

    It is not started by the server of commands: a signal would only reach that one's client.
    """
    assert "--port" not in command
    place = f"127.0.0.1:{free_port()}"
    python = command.replace("picompile serve", f"exec {sys.executable} -m picompile serve")
    words = ["bash", "-c", f"{python} --port {place.partition(':')[2]}"]
    with subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).startswith("serving "):
                assert line, f"{command}: ended"
            yield place
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
