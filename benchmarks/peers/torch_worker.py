"""Worker for PyTorch: transformers' own model, as a Hugging Face user runs it. Arguments: MODEL DTYPE.

Weights of DTYPE, `sdpa` attention, a `DynamicCache`, no torch.compile.
"""

import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.worker import STEPS, Request, next_tokens, serve, text


class TorchSession:
    def __init__(self, model: Any, request: Request) -> None:
        torch.set_num_threads(request["threads"])
        self._model, self._context_tokens, self._batch = model, request["context"], request["batch"]
        self._tokens = text(model.config.vocab_size, self._context_tokens + STEPS)
        self._cache = DynamicCache(config=model.config)

    def fill(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._run([self._tokens[: self._context_tokens]] * self._batch)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            tokens = next_tokens(self._tokens, self._cache.get_seq_length(), self._batch)
            self._run([[token] for token in tokens])

    def rewind(self) -> None:
        if behind := self._cache.get_seq_length() - self._context_tokens:
            self._cache.crop(-behind)

    def facts(self, op: str) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._cache

    @torch.inference_mode()
    def _run(self, tokens: list[list[int]]) -> None:
        self._model(torch.tensor(tokens), past_key_values=self._cache, use_cache=True, logits_to_keep=1)


def main() -> None:
    folder, dtype = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    about = {
        "version": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "system": torch.backends.cpu.get_cpu_capability(),
        "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
    }
    serve(about, lambda request: TorchSession(model, request))


if __name__ == "__main__":
    main()
