"""llama.cpp's own endpoints, by which most of its tests ask, in terms of the server's: /completion and /apply-template.

What a test cannot learn from the server's answer is left out, and the test fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPLETION = ("/completion", "/completions")
TEMPLATE = "/apply-template"
_STOP_TYPES = {"length": "limit", "stop": "eos"}


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
