"""Runs `picompile` as a process of its own without the seconds in which it imports torch and TVM, for tests of dozens
of commands: a server that has them, and has captured the bundled model, forks for each.

python tests/helpers/command_server.py FOLDER

`FOLDER/bin/picompile` is the command then, with working folder, environment and streams of whoever calls it.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_MOST_BYTES = 2**20
_CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16) or 70))
"""


@contextmanager
def command_server(folder: Path) -> Iterator[Path]:
    """The folder with the command, as long as the block runs."""
    # One thread: it must be forked, and tests run side by side.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server of commands did not start"
        yield folder / "bin"
    finally:
        server.kill()
        server.wait()


def main() -> None:
    folder = Path(sys.argv[1])
    listener = socket.socket(socket.AF_UNIX)
    address = str(folder / "socket")
    listener.bind(address)
    listener.listen()
    (folder / "bin").mkdir()
    client = folder / "bin" / "picompile"
    client.write_text(_CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    _import_all()
    _capture_bundled_model()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _serve(connection)
        connection.close()
        _reap()


def _import_all() -> None:
    """Import the modules that most commands need."""
    for name in (
        "picompile.frontend.hf",
        "picompile.cli",
        "picompile.compile",
        "picompile.placement.planning",
        "picompile_codegen.build.host_library",
        "picompile_codegen.lowering.lower",
        "picompile_runtime",
        "torch.export",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(name)


def _capture_bundled_model() -> None:
    """So that the processes of commands need not: a process captures a model once."""
    from picompile.frontend.hf import load_model

    load_model(Path(__file__).parents[2] / "models" / "tiny-reglu")


def _serve(connection: socket.socket) -> NoReturn:
    """Runs one command in a process of its own, and says how it ended."""
    text, streams, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    while part := connection.recv(_MOST_BYTES):
        text += part
    child = os.fork()
    if child == 0:
        connection.close()
        _run(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _run(request: dict, streams: list[int]) -> NoReturn:
    from picompile.cli import main as picompile

    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["picompile", *request["words"]]
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        code = picompile()
    except SystemExit:  # the reader of the output went away
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
