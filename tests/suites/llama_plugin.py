"""A plugin of pytest for llama.cpp's suite: its tests ask llama.cpp's server, and are answered by ours.

llama.cpp's own endpoints, by which most of its tests ask, are written in terms of the server's: /completion and
/apply-template. What a test cannot learn from the server's answer is left out, and the test fails.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from results import Results

# These have no /v1 in front there.
_OPENAI_PATHS = ("/chat/completions", "/responses", "/models")
# llama.cpp's own.
COMPLETION = ("/completion", "/completions")
TEMPLATE = "/apply-template"
_STOP_TYPES = {"length": "limit", "stop": "eos"}


def pytest_configure(config: Any) -> None:
    """Register the table of results, and change how the suite asks."""
    import utils  # type: ignore[import-not-found]  # the suite's

    config.pluginmanager.register(Results())
    os.environ["LLAMA_SERVER_BIN_PATH"] = str(Path(__file__).with_name("llama_server.py"))
    os.environ.setdefault("PORT", "18110")
    if "SUITE_LLAMA_SERVER" not in os.environ:
        _translate(utils.ServerProcess)
    # It would start every model of llama.cpp's, to fetch it.
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def _translate(server: Any) -> None:
    """Have the suite's `ServerProcess` ask for the paths and the fields that our server has."""
    make_url, request, stream = server.make_url, server.make_request, server.make_stream_request

    def make_url_with_version(self: Any, path: str, host: str | None = None) -> str:
        return str(make_url(self, f"/v1{path}" if path in _OPENAI_PATHS else path, host))

    def make_request(self: Any, method: str, path: str, data: Any = None, *rest: Any, **options: Any) -> Any:
        if method == "POST" and path in COMPLETION:
            body = completion_body(data, self)
            answer = request(self, method, "/v1/completions", body, *rest, **options)
            if answer.status_code == 200:
                answer.body = completion_answer(answer.body, data)
            return answer
        if path == TEMPLATE:
            answer = request(self, method, "/tokenize", template_body(data, self), *rest, **options)
            if answer.status_code == 200:
                answer.body = template_answer(answer.body)
            return answer
        return request(self, method, path, with_sampling(self, path, data), *rest, **options)

    def make_stream_request(
        self: Any, method: str, path: str, data: Any = None, *rest: Any, **options: Any
    ) -> Iterator[Any]:
        if path not in COMPLETION:
            yield from stream(self, method, path, with_sampling(self, path, data), *rest, **options)
            return
        body = completion_body(data, self)
        for chunk in stream(self, method, "/v1/completions", body, *rest, **options):
            yield from completion_chunks(chunk, data)

    def with_sampling(self: Any, path: str, data: Any) -> Any:
        return {**sampling(self), **data} if path.endswith("/chat/completions") else data

    server.make_url, server.make_request = make_url_with_version, make_request
    server.make_stream_request = make_stream_request


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Have the server take the names of models that a test uses: llama.cpp's server takes every name."""
    names = re.findall(r'model="([^"]+)"', inspect.getsource(item.function))
    given = item.callspec.params.get("model") if hasattr(item, "callspec") else None
    os.environ["SUITE_NAMES"] = json.dumps([*names, *([given] if given else [])])


def completion_body(data: Mapping[str, Any], server: Any) -> dict[str, Any]:
    """Return the body of POST /v1/completions."""
    body = {**sampling(server), **data, "return_token_ids": True}
    most = body.pop("n_predict", server.n_predict)
    return {**body, "max_tokens": 2**31 - 1 if most in (None, -1) else most}


def sampling(server: Any) -> dict[str, Any]:
    """Return how a server chooses tokens where a request does not say; the suite gives that as options."""
    return {"temperature": server.temperature, "seed": server.seed}


def completion_answer(answer: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """Return what /completion answers: an object, or a list of them for several prompts."""
    made = [_answer(choice, data) | {"timings": answer["timings"]} for choice in answer["choices"]]
    return made if len(made) > 1 else made[0]


def _answer(choice: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    tokens, finish = choice["token_ids"], choice["finish_reason"]
    return {
        "content": choice["text"],
        "tokens": tokens if data.get("return_tokens") else [],
        "stop": True,
        "stop_type": _STOP_TYPES[finish],
        "truncated": finish == "length" and len(tokens) != data.get("n_predict"),
        "has_new_line": "\n" in choice["text"],
    }


def completion_chunks(chunk: Mapping[str, Any], data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of /completion that a chunk of ours is: its text, and then that it is the last."""
    if not chunk["choices"]:
        return []
    choice = chunk["choices"][0]
    made: list[dict[str, Any]] = [{"content": choice["text"], "tokens": choice["token_ids"], "stop": False}]
    if choice["finish_reason"] is not None:
        made.append({**_answer(choice, data), "content": "", "timings": chunk["timings"]})
    return made


def template_body(data: Mapping[str, Any], server: Any) -> dict[str, Any]:
    """Return the body of POST /tokenize for a chat's prompt."""
    body = {key: value for key, value in data.items() if value is not None}
    if server.reasoning is not None:
        body["chat_template_kwargs"] = {"enable_thinking": server.reasoning != "off"}
    return {**body, "with_pieces": True}


def template_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what /apply-template answers: the text of the prompt."""
    pieces = (token["piece"] for token in answer["tokens"])
    content = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    return {"prompt": content.decode()}
