"""Worker of benchmarks.peers for OpenVINO's CPU plugin: MODEL.xml, or --export CHECKPOINT MODEL.xml FORMAT.

Hint LATENCY, KV cache float16, everything else at its defaults; the inference precision is then OpenVINO's choice
(bfloat16 where the processor has it) and is told in `about`.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import STEPS, Request, missing, serve, text

try:
    import numpy as np
    import openvino as ov

    from benchmarks.peers.openvino_model import export
except ImportError:
    missing("openvino or safetensors", "pip install openvino safetensors")


class OpenvinoSession:
    def __init__(self, model: Any, vocab: int, request: Request) -> None:
        self._context_tokens, self._batch = request["context"], request["batch"]
        self._request = _compile(model, request["threads"]).create_infer_request()
        self._tokens = np.array(text(vocab, self._context_tokens + STEPS), np.int64)
        self._position = 0

    def fill(self) -> None:
        self._request.reset_state()
        self._position = 0
        self._run(self._context_tokens)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._run(1)

    def rewind(self) -> None:
        # A state can be set, but is then stored in another way than the one that decoding made.
        self.fill()

    def facts(self, op: str) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._request

    def _run(self, count: int) -> None:
        rows = np.arange(self._position, self._position + count)
        tokens = np.tile(self._tokens[rows], (self._batch, 1))
        beams = np.arange(self._batch, dtype=np.int32)
        self._request.infer({"tokens": tokens, "positions": rows[None], "beams": beams})
        self._position += count


def _compile(model: Any, threads: int) -> Any:
    properties = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "KV_CACHE_PRECISION": "f16",
    }
    return ov.Core().compile_model(model, "CPU", properties)


def main() -> None:
    if sys.argv[1] == "--export":
        checkpoint, output, format = sys.argv[2:]
        return export(Path(checkpoint), Path(output), format)
    path = Path(sys.argv[1])
    core = ov.Core()
    model = core.read_model(path)
    about = {
        "version": f"openvino {ov.__version__}",
        "system": f"inference precision {core.get_property('CPU', 'INFERENCE_PRECISION_HINT').get_type_name()}",
        "weight_bytes": path.with_suffix(".bin").stat().st_size,
    }
    vocab = model.output("logits").get_partial_shape()[1].get_length()
    return serve(about, lambda request: OpenvinoSession(model, vocab, request))


if __name__ == "__main__":
    main()
