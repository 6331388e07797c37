"""nginx and Caddy with the configurations in deploy/, at ports of a test's own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from helpers.support import ROOT

DEPLOY = ROOT / "deploy"
_PATIENCE_S = 30.0
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin"


def program(name: str) -> str:
    """Return the path of a program of the system. Skip the test where it is not installed."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:{_SYSTEM_FOLDERS}")
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {name}")
    return found


@contextmanager
def nginx(folder: Path, replicas: Sequence[str]) -> Iterator[str]:
    """Run nginx before `replicas`, which are URLs, and yield its URL. Its files go to `folder`."""
    port, text = free_port(), (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder};\n" for kind in kinds)  # the usual ones are root's
    changes = {"listen 8080;": f"listen 127.0.0.1:{port};", "http {": f"http {{\naccess_log {folder}/log;\n{folders}"}
    config = folder / "nginx.conf"
    config.write_text(_at_ports(text, replicas, changes), encoding="utf-8")
    options = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
    if os.geteuid() == 0:
        options += " user root;"  # its usual user cannot write to the folders of tests
    command = [program("nginx"), "-e", f"{folder}/error.log", "-p", str(folder), "-c", str(config), "-g", options]
    with _running(command, f"http://127.0.0.1:{port}", {}) as url:
        yield url


@contextmanager
def caddy(folder: Path, replicas: Sequence[str]) -> Iterator[str]:
    """Run Caddy before `replicas`, which are URLs, and yield its URL."""
    port, text = free_port(), caddyfile()
    alone = "{\n admin off\n}\n"  # a test must not touch Caddy's port for commands
    config = folder / "Caddyfile"
    config.write_text(alone + _at_ports(text, replicas, {}), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    homes = {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "SITE": url}
    with _running([program("caddy"), "run", "--config", str(config)], url, homes) as url:
        yield url


def caddyfile() -> str:
    """Return the text of deploy/Caddyfile. Skip the test where the installed Caddy is too old for it."""
    version = subprocess.run([program("caddy"), "version"], capture_output=True, text=True, check=True).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (2, 6, 3):
        pytest.skip(f"needs Caddy 2.6.3 or later, and this is {version.split()[0]}")
    return (DEPLOY / "Caddyfile").read_text(encoding="utf-8")


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def _at_ports(text: str, replicas: Sequence[str], changes: Mapping[str, str]) -> str:
    """Return a configuration for other ports; what is to be changed in it must be there."""
    places = {f"127.0.0.1:{8081 + number}": re.sub("^http://", "", url) for number, url in enumerate(replicas)}
    for old, new in {**places, **changes}.items():
        assert old in text, old
        # Not in comments, which say how to start it.
        text = "\n".join(line if line.startswith("#") else line.replace(old, new) for line in text.splitlines())
    return text


@contextmanager
def _running(command: Sequence[str], url: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Run a proxy until the block ends; yield its URL when it answers."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=quiet, stderr=quiet)
    try:
        end = time.monotonic() + _PATIENCE_S
        while not _answers(url):
            assert process.poll() is None, f"{command[0]} ended with exit code {process.poll()}"
            assert time.monotonic() < end, f"{command[0]} does not answer"
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/metrics").status_code == httpx.codes.NOT_FOUND
    except httpx.TransportError:
        return False
