"""Requests in the form in which Codex, Claude Code, Continue and Open WebUI send them, with all fields that they add.

They are written by hand after the public code of these programs; texts and tools are shortened.
"""

from __future__ import annotations

import json
from typing import Any

from helpers import fake_serving
from helpers.fake_serving import agent_model, client_of, prompt_of

COMMAND = {"type": "array", "items": {"type": "string"}}
SHELL = {"type": "object", "properties": {"command": COMMAND}, "required": ["command"], "additionalProperties": False}
CALLED = '{"command": ["ls"]}'
CALL = f'<tool_call>\n{{"name": "shell", "arguments": {CALLED}}}\n</tool_call>'
SAYS = f"<think>\nLook.\n</think>\n\nI look.\n{CALL}"


def text(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": each} for each in texts]}


# codex-rs/codex-api/src/common.rs, `ResponsesApiRequest`; tools of kinds that only OpenAI runs are offered unasked.
CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are Codex.",
    "input": [text("developer", "<permissions>"), text("user", "<environment_context>"), text("user", "What is here?")],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SHELL},
        {"type": "custom", "name": "apply_patch", "description": "x", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "service_tier": "priority",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def test_codex_calls_a_tool_and_goes_on() -> None:
    model = agent_model(SAYS)
    client = client_of(model)
    headers = {"openai-beta": "responses=experimental", "originator": "codex_cli_rs", "session_id": "0199"}
    answer = client.post("/v1/responses", json=CODEX, headers=headers)
    assert answer.status_code == 200, answer.text
    events = [json.loads(event.partition("data: ")[2]) for event in answer.text.strip().split("\n\n")]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 0
    prompt = prompt_of(model)
    assert prompt.startswith("[system:You are Codex.\n\n<permissions>") and "apply_patch" not in prompt
    # Codex leaves out the text of reasoning, and keeps what it is told is encrypted.
    kept = [{key: value for key, value in item.items() if key not in ("content", "status")} for item in items[:1]]
    output = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "a.py"}
    again = client.post("/v1/responses", json={**CODEX, "input": [*CODEX["input"], *kept, *items[1:], output]})
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
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "Hi"}]}
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
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "temperature": 1,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}


def test_claude_code_calls_a_tool() -> None:
    model = agent_model(SAYS)
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    answer = client_of(model).post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=headers)
    assert answer.status_code == 200, answer.text
    assert '"stop_reason":"tool_use"' in answer.text and prompt_of(model).startswith("[system:You are Claude Code.")
    assert prompt_of(model).endswith("[user:<system-reminder>\n\nHi]True") and "web_search" not in prompt_of(model)
    counted = {key: CLAUDE_CODE[key] for key in ("model", "system", "messages", "tools", "thinking")}
    made = fake_serving.made(client_of(model), "/v1/messages/count_tokens", **counted)
    assert made["input_tokens"] == len(model.scheduler.asked[0].request.prompt)  # type: ignore[attr-defined]


TOOL = {"type": "function", "function": {"name": "shell", "description": "Runs.", "parameters": SHELL}}
# Continue's adapter for OpenAI's API, in agent mode.
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


def test_continue_streams_a_chat_with_tools() -> None:
    model = agent_model("It has a.py.")
    chunks = fake_serving.streamed(client_of(model), "/v1/chat/completions", **CONTINUE)
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == "It has a.py." and chunks[-1]["usage"]["completion_tokens"] > 0
    assert f"[assistant: !shell{CALLED}][tool:a.py]" in prompt_of(model)


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
