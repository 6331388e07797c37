"""A plugin of pytest for vLLM's test_completion.py: the file asks the server at SUITE_URL, whose model is SUITE_MODEL.

It makes what the file imports of vLLM: `RemoteOpenAIServer`, which starts a server there, and `get_tokenizer`.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import openai
from results import Results
from tokenizers import Tokenizer


class RemoteOpenAIServer(ExitStack):
    """The server that runs; vLLM's options say nothing that ours has to be told."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        super().__init__()

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return a client of it."""
        url = f"{os.environ['SUITE_URL']}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600, **options)


def get_tokenizer(tokenizer_name: str) -> Any:
    """Return a tokenizer that turns ids into text as transformers' do: with special tokens."""
    tokenizer = Tokenizer.from_file(str(Path(os.environ["SUITE_MODEL"], "tokenizer.json")))
    return types.SimpleNamespace(decode=partial(tokenizer.decode, skip_special_tokens=False))


def pytest_configure(config: Any) -> None:
    """Register the table of results, and make the modules."""
    config.pluginmanager.register(Results())
    for name in ("tests", "tests.utils", "vllm", "vllm.tokenizers"):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(RemoteOpenAIServer=RemoteOpenAIServer, get_tokenizer=get_tokenizer)
