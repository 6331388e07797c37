"""Requests in the form in which Codex, Claude Code, Continue, opencode and Open WebUI send them, with all their fields.

Those of the first four are written after what the programs sent (Codex 0.171.0, Claude Code 2.1.197, Continue's CLI
1.5.47, opencode 1.18.33), those of Open WebUI after its public code; texts and tools are shortened.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers import fake_serving
from helpers.fake_serving import agent_model, client_of, prompt_of

COMMAND = {"type": "array", "items": {"type": "string"}}
SHELL = {"type": "object", "properties": {"command": COMMAND}, "required": ["command"], "additionalProperties": False}
CALLED = '{"command": ["ls"]}'
CALL = f'<tool_call>\n{{"name": "shell", "arguments": {CALLED}}}\n</tool_call>'
SAYS = f"<think>\nLook.\n</think>\n\nI look.\n{CALL}"


def text(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": each} for each in texts]}


# Tools of kinds that only OpenAI runs are offered unasked, and functions in namespaces.
CODEX: dict[str, Any] = {
    "model": "fake",
    "stream": True,
    "input": [
        {"id": "msg_1", **text("developer", "You are Codex.")},
        {"id": "msg_2", **text("developer", "<skills_instructions>", "<permissions instructions>")},
        {"id": "msg_3", **text("user", "<environment_context>")},
        {"id": "msg_4", **text("user", "What is here?")},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SHELL},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents.",
            "tools": [{"type": "function", "name": "close_agent", "strict": False, "parameters": SHELL}],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"session_id": "1", "x-codex-turn-metadata": "{}"},
}
# Codex sends this for OpenAI's own models, by codex-rs/codex-api/src/common.rs, `ResponsesApiRequest`.
CODEX_FOR_OPENAI: dict[str, Any] = {
    **CODEX,
    "instructions": "You are Codex.",
    "input": CODEX["input"][1:],
    "tools": [
        *CODEX["tools"],
        {"type": "custom", "name": "apply_patch", "description": "x", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "local_shell"},
    ],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "medium"},
    "service_tier": "priority",
}


@pytest.mark.parametrize("body", [CODEX, CODEX_FOR_OPENAI])
def test_codex_calls_a_tool_and_goes_on(body: dict[str, Any]) -> None:
    model = agent_model(SAYS)
    client = client_of(model)
    headers = {"accept": "text/event-stream", "originator": "codex_exec", "session-id": "0199", "thread-id": "0199"}
    answer = client.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    events = [json.loads(event.partition("data: ")[2]) for event in answer.text.strip().split("\n\n")]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 0
    prompt = prompt_of(model)
    assert prompt.startswith("[system:You are Codex.\n\n<skills_instructions>") and "apply_patch" not in prompt
    assert "[user:<environment_context>][user:What is here?]" in prompt
    # It hands back reasoning in full; for OpenAI's models the form that it is told is encrypted, without the text.
    reasoning, *others = items
    kept = [
        {key: value for key, value in reasoning.items() if key not in ("content", "status") or body is CODEX},
        *others,
        {"type": "function_call_output", "id": "fco_1", "call_id": items[2]["call_id"], "output": "a.py"},
    ]
    again = client.post("/v1/responses", json={**body, "input": [*body["input"], *kept]})
    assert again.status_code == 200, again.text
    expected = f"[assistant:<think>Look.</think>I look.!shell{CALLED}][tool:a.py]"
    assert expected in prompt_of(model)


CLAUDE_CODE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a5145;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>"},
                {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Available agent types"},
    ],
    "tools": [
        {
            "name": "shell",
            "description": "Runs.",
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SHELL},
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def test_claude_code_calls_a_tool_and_goes_on() -> None:
    model = agent_model(SAYS)
    assert client_of(model).head("/").status_code == 200
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    answer = client_of(model).post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=headers)
    assert answer.status_code == 200, answer.text
    assert '"stop_reason":"tool_use"' in answer.text and prompt_of(model).startswith("[system:You are Claude Code.")
    assert prompt_of(model).endswith("[user:<system-reminder>\n\nHi][system:Available agent types]")
    assert "web_search" not in prompt_of(model)
    counted = {key: CLAUDE_CODE[key] for key in ("model", "system", "messages", "tools", "thinking")}
    made = fake_serving.made(client_of(model), "/v1/messages/count_tokens", **counted)
    assert made["input_tokens"] == len(model.scheduler.asked[0].request.prompt)  # type: ignore[attr-defined]
    turn = [
        {"type": "thinking", "thinking": "Look.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "shell", "input": json.loads(CALLED)},
    ]
    result = {"tool_use_id": "call_1", "type": "tool_result", "content": "a.py", "is_error": False}
    more = [{"role": "assistant", "content": turn}, {"role": "user", "content": [result]}]
    again = client_of(model).post("/v1/messages", json={**CLAUDE_CODE, "messages": [*CLAUDE_CODE["messages"], *more]})
    assert again.status_code == 200, again.text
    assert f"[assistant:<think>Look.</think>I look.!shell{CALLED}][tool:a.py]" in prompt_of(model)


TOOL = {"type": "function", "function": {"name": "shell", "description": "Runs.", "parameters": SHELL}}
# Continue's adapter for OpenAI's API, in agent mode: what its editors add, after its public code.
CONTINUE: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "<important_rules>"},
        {"role": "user", "content": [{"type": "text", "text": "What is here?"}]},
        {"role": "assistant", "content": " ", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": CALLED}}
        ]},
        {"role": "tool", "content": "a.py", "tool_call_id": "call_1"},
    ],
    "max_tokens": 100,
    "temperature": 0.2,
    "stop": ["<|end|>"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "prediction": None,
}  # fmt: skip


# Its command line, and opencode: the second of these hands back reasoning.
CONTINUE_CLI = {
    key: [*CONTINUE["messages"][:2], {**CONTINUE["messages"][2], "content": "I look."}, CONTINUE["messages"][3]]
    if key == "messages"
    else CONTINUE[key]
    for key in ("model", "messages", "tools", "stream", "stream_options")
}
OPENCODE = {
    **CONTINUE_CLI,
    "messages": [
        {**each, "reasoning_content": "Look."} if each["role"] == "assistant" else each
        for each in CONTINUE_CLI["messages"]
    ],
    "max_tokens": 32000,
    "tool_choice": "auto",
}


@pytest.mark.parametrize(
    ("body", "answered"),
    [(CONTINUE, " "), (CONTINUE_CLI, "I look."), (OPENCODE, "<think>Look.</think>I look.")],
)
def test_continue_and_opencode_stream_a_chat_with_tools(body: dict[str, Any], answered: str) -> None:
    model = agent_model("It has a.py.")
    chunks = fake_serving.streamed(client_of(model), "/v1/chat/completions", **body)
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == "It has a.py." and chunks[-1]["usage"]["completion_tokens"] > 0
    assert f"[assistant:{answered}!shell{CALLED}][tool:a.py]" in prompt_of(model)


def test_opencode_asks_for_a_title() -> None:
    model = agent_model(SAYS.partition(CALL)[0])
    asked = [
        {"role": "system", "content": "Titles."},
        *({"role": "user", "content": each} for each in ("Title:", "Hi")),
    ]
    title = {"model": "fake", "max_tokens": 32000, "reasoning_effort": "low", "messages": asked}
    chunks = fake_serving.streamed(client_of(model), "/v1/chat/completions", stream_options=None, **title)
    assert any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
    assert prompt_of(model).startswith("[system:Titles.][user:Title:][user:Hi]lowTrue")


# Open WebUI: a chat, and the request for its title.
OPEN_WEBUI: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "top_k": 40,
    "min_p": 0.0,
    "repeat_penalty": 1.1,
    "reasoning_effort": "low",
    "seed": 1,
    "stop": ["END"],
    "max_tokens": 100,
    "user": "u",
}


def test_open_webui_chats_and_asks_for_a_title() -> None:
    model = agent_model(SAYS.partition(CALL)[0])
    client = client_of(model)
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["fake"]
    chunks = fake_serving.streamed(client, "/v1/chat/completions", **OPEN_WEBUI)
    thoughts = [chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks if chunk["choices"]]
    assert "".join(thoughts) == "Look."
    title = {"model": "fake", "messages": OPEN_WEBUI["messages"], "stream": False, "max_completion_tokens": 1000}
    message = fake_serving.made(client, "/v1/chat/completions", **title)["choices"][0]["message"]
    assert message["content"].strip() == "I look."
