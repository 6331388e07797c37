"""Worker of benchmarks.peers for PowerInfer on the CPU: powerinfer_worker.py LIBRARY MODEL.powerinfer.gguf.

LIBRARY is what peers_powerinfer_build.py makes. As in llama.cpp, from which PowerInfer comes, a step is one
llama_decode.
"""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import STEPS, Request, next_tokens, serve, text

_CHUNK = 512
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "pi_load": (ctypes.c_void_p, [ctypes.c_char_p]),
    "pi_vocab": (ctypes.c_int, [ctypes.c_void_p]),
    "pi_is_sparse": (ctypes.c_int, [ctypes.c_void_p]),
    "pi_bytes": (ctypes.c_uint64, [ctypes.c_void_p]),
    "pi_system": (ctypes.c_char_p, []),
    "pi_open": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "pi_read": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int, ctypes.c_int]),
    "pi_logits": (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int]),
    "pi_rewind": (None, [ctypes.c_void_p, ctypes.c_int]),
    "pi_close": (None, [ctypes.c_void_p]),
}


def open_library(path: str) -> ctypes.CDLL:
    """Return the library, its functions with their types."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)  # which keeps it; library[name] is another at each time
        function.restype, function.argtypes = result, arguments
    return library


class PowerInferSession:
    """One context, all parameters but sizes and threads at their defaults: KV cache f16."""

    def __init__(self, library: ctypes.CDLL, model: int, request: Request) -> None:
        if request["batch"] != 1:
            raise ValueError("several sequences are not measured of PowerInfer")
        self._library, self._context_tokens = library, request["context"]
        room = self._context_tokens + STEPS
        self._session = library.pi_open(model, room, min(_CHUNK, room), request["threads"])
        if not self._session:
            raise MemoryError(f"PowerInfer has no context of {room} tokens")
        self._tokens = text(library.pi_vocab(model), room)
        self._position = 0

    def fill(self) -> None:
        self._library.pi_rewind(self._session, 0)
        for start in range(0, self._context_tokens, _CHUNK):
            self.read(self._tokens[start : min(start + _CHUNK, self._context_tokens)], start)
        self._position = self._context_tokens

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.read(next_tokens(self._tokens, self._position, 1), self._position)
            self._position += 1

    def rewind(self) -> None:
        self._library.pi_rewind(self._session, self._context_tokens)
        self._position = self._context_tokens

    def facts(self, op: str) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._library.pi_close(self._session)

    def read(self, tokens: list[int], position: int) -> Any:
        """Read `tokens` behind `position`, and return a pointer to the last one's logits."""
        if code := self._library.pi_read(self._session, (ctypes.c_int32 * len(tokens))(*tokens), len(tokens), position):
            raise RuntimeError(f"llama_decode returned {code}")
        return self._library.pi_logits(self._session, len(tokens) - 1)


def _commit(library: Path) -> str:
    """Return the commit of the sources that `library` was built in, or nothing where they are no clone."""
    command = ["git", "-C", str(library.parent.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    library = open_library(sys.argv[1])
    model = library.pi_load(sys.argv[2].encode())
    if not model:
        sys.exit(f"PowerInfer cannot load {sys.argv[2]}")
    if not library.pi_is_sparse(model):
        sys.exit(f"PowerInfer computes every neuron of {sys.argv[2]}")
    about = {
        "version": f"PowerInfer {_commit(Path(sys.argv[1]))}".strip(),
        "system": library.pi_system().decode().strip(" |\n"),
        "weight_bytes": library.pi_bytes(model),
    }
    serve(about, lambda request: PowerInferSession(library, model, request))


if __name__ == "__main__":
    main()
