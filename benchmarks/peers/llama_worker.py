"""Worker of benchmarks.peers for llama.cpp: llama_worker.py MODEL.gguf.

It calls llama.cpp's C functions through llama-cpp-python's bindings, as llama-bench does: one llama_decode a step.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.worker import STEPS, Request, missing, next_tokens, serve, text

try:
    import llama_cpp
except ImportError:
    missing("llama_cpp", "pip install llama-cpp-python")

_CHUNK = 512


@llama_cpp.llama_log_callback
def _quiet(level: int, message: bytes, data: Any) -> None:
    """Nothing of what it says while loading; a null pointer instead would bring the default back."""


class LlamaSession:
    """One llama_context, all parameters but sizes and threads at their defaults: KV cache f16, flash attention auto.

    Sequences have caches of their own (`kv_unified` off), as they do in llama-batched-bench.
    """

    def __init__(self, model: Any, request: Request) -> None:
        self._context_tokens, self._batch, threads = request["context"], request["batch"], request["threads"]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._batch * (self._context_tokens + STEPS)
        params.n_batch = params.n_ubatch = _CHUNK
        params.n_seq_max = self._batch
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp has no context of {params.n_ctx} tokens")
        self._bytes = _bytes_per_token(model)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._tokens = text(vocab_of(model), self._context_tokens + STEPS)
        self._rows = llama_cpp.llama_batch_init(max(_CHUNK, self._batch), 0, 1)
        self._position = 0

    def fill(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        for start in range(0, self._context_tokens, _CHUNK):
            rows = range(start, min(start + _CHUNK, self._context_tokens))
            is_last = rows.stop == self._context_tokens
            self._run([(self._tokens[i], i, 0, is_last and i == rows[-1]) for i in rows])
        for sequence in range(1, self._batch):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._position = self._context_tokens

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            tokens = next_tokens(self._tokens, self._position, self._batch)
            self._run([(token, self._position, sequence, True) for sequence, token in enumerate(tokens)])
            self._position += 1

    def rewind(self) -> None:
        for sequence in range(self._batch):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, self._context_tokens, -1)
        self._position = self._context_tokens

    def facts(self, op: str) -> dict[str, float]:
        if op == "prefill" or self._batch > 1:
            return {}
        weights, a_cached_token = self._bytes
        return {"bytes_per_token": weights + a_cached_token * (self._context_tokens + self._position) / 2}

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._rows)
        llama_cpp.llama_free(self._context)

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One llama_decode of (token, position, sequence, whether its logits are wanted), and waits for it."""
        self._rows.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self._rows.token[i], self._rows.pos[i] = token, position
            self._rows.n_seq_id[i], self._rows.seq_id[i][0] = 1, sequence
            self._rows.logits[i] = wanted
        if code := llama_cpp.llama_decode(self._context, self._rows):
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(self._context)


def _bytes_per_token(model: Any) -> tuple[float, float]:
    """Bytes of the weights that a token reads, all but the embedding's; and of one cached token, keys and values f16.

    A matrix has the mean bytes of a weight: all are of one format.
    """
    hidden, layers = llama_cpp.llama_model_n_embd(model), llama_cpp.llama_model_n_layer(model)
    weight = llama_cpp.llama_model_size(model) / llama_cpp.llama_model_n_params(model)
    kv_width = hidden // llama_cpp.llama_model_n_head(model) * llama_cpp.llama_model_n_head_kv(model)
    return llama_cpp.llama_model_size(model) - vocab_of(model) * hidden * weight, 2 * 2 * layers * kv_width


def vocab_of(model: Any) -> int:
    return int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))


def main() -> None:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {sys.argv[1]}")
    about = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "system": llama_cpp.llama_print_system_info().decode().strip(" |\n"),
        "weight_bytes": llama_cpp.llama_model_size(model),
    }
    serve(about, lambda request: LlamaSession(model, request))


if __name__ == "__main__":
    main()
