"""Run vLLM's tests/entrypoints/openai/completion/test_completion.py against a server of ours.

python tests/suites/run_vllm.py --suite test_completion.py --artifact ARTIFACT [--model HF_FOLDER] [--out results.md]

The adapter is what the file imports of vLLM: `RemoteOpenAIServer`, which starts a server, and `get_tokenizer`.
"""

from __future__ import annotations

import argparse
import sys
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from results import Results
from serving import SERVER_PYTHON, serving
from tokenizers import Tokenizer


class TokenizerOfVllm:
    """A tokenizer that turns ids into text as transformers' do: with special tokens."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def install(artifact: Path, server_python: Path) -> None:
    """Make what the suite imports of vLLM."""

    class RemoteOpenAIServer(ExitStack):
        """A server with the model under its name; vLLM's options say nothing that ours has to be told."""

        def __init__(self, model: str, arguments: list[str]) -> None:
            super().__init__()
            self.url = self.enter_context(serving("--model", f"{model}={artifact}", python=server_python))

        def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
            """Return a client of it."""
            return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600, **options)

    tokenizer = {"get_tokenizer": lambda tokenizer_name: TokenizerOfVllm(artifact / "tokenizer.json")}
    members: dict[str, dict[str, Any]] = {"tests": {}, "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer}}
    members |= {"vllm": {}, "vllm.tokenizers": tokenizer}
    for name, found in members.items():
        module = types.ModuleType(name)
        vars(module).update(found)
        sys.modules[name] = module


def main() -> int:
    """Run the suite, and return 0 if no test failed but those that are expected to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--server-python", type=Path, default=SERVER_PYTHON, help="Python that has the server.")
    parser.add_argument("--out", type=Path)
    options, rest = parser.parse_known_args()
    install(options.artifact, options.server_python)
    results = Results()
    arguments = ["--rootdir", options.suite.parent, "--import-mode=importlib", "-p", "no:cacheprovider", "-q"]
    pytest.main([*map(str, arguments), *rest, str(options.suite)], [results])
    return 0 if results.write(options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
