"""Worker of benchmarks.peers for picompile's runtime, without torch and compiler: picompile_worker.py ARTIFACT."""

import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.peers.worker import STEPS, Request, next_tokens, serve, text
from picompile_runtime.artifact.interfaces import choose_variant
from picompile_runtime.artifact.manifest import read_manifest
from picompile_runtime.bench.bandwidth import MemoryReader, bytes_per_token
from picompile_runtime.engine.engine import Engine, load
from picompile_runtime.engine.timing import mean_shares

# Eight times a large last-level cache.
_READ_BYTES = 2**28


class PicompileSession:
    def __init__(self, artifact: Path, request: Request) -> None:
        self._context_tokens, self._slots = request["context"], range(request["batch"])
        self._engine: Engine = load(artifact, request["threads"])
        self._reader = MemoryReader(self._engine.artifact.load_code(), self._engine.threads, _READ_BYTES)
        self._tokens = text(self._engine.vocab, self._context_tokens + STEPS)

    def fill(self) -> None:
        for slot in self._slots:
            self._engine.reset(slot)
        self._engine.prefill(self._tokens[: self._context_tokens], copy=False)
        for slot in self._slots[1:]:
            self._engine.copy(0, slot)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            tokens = next_tokens(self._tokens, self._engine.position, len(self._slots))
            if len(tokens) == 1:
                self._engine.decode(tokens[0], copy=False)
            else:
                self._engine.decode_sequences(tokens, self._slots, copy=False)

    def rewind(self) -> None:
        for slot in self._slots:
            self._engine.rewind(self._context_tokens, slot)
        self._engine.reset_firing()

    def facts(self, op: str) -> dict[str, float]:
        facts = {"bandwidth_bytes_per_s": float(np.median(self._reader.read()))}
        if op == "prefill":
            return facts
        function = "decode" if len(self._slots) == 1 else "batch"
        firing = self._engine.firing(function)
        computed, fired = mean_shares(firing)
        if not computed:  # kernels that compute every neuron of a batch do not count them
            return facts
        cached = (self._context_tokens + self._engine.position) / 2
        moved = bytes_per_token(self._engine.artifact, firing, cached) if function == "decode" else None
        shares = {"computed_share": computed, "firing_share": fired}
        return facts | shares | ({"bytes_per_token": moved} if moved else {})

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    artifact = Path(sys.argv[1])
    about = {
        "version": f"picompile {version('picompile')}",
        "system": choose_variant(read_manifest(artifact).code).isa,
        "weight_bytes": (artifact / "weights.safetensors").stat().st_size,
    }
    serve(about, lambda request: PicompileSession(artifact, request))


if __name__ == "__main__":
    main()
