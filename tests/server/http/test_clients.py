"""Clients that people use, unchanged: OpenAI's and its Agents SDK, Anthropic's, LangChain and LiteLLM.

Where a test says what the model says, the model is a fake that calls a tool, and answers when it has the result. The
other tests run a model of random weights, which calls tools because it must.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from helpers.fake_serving import agent_model, client_of, prompt_of, text_tokens
from helpers.serving_process import ServingProcess, build_chat_artifact, serving, serving_thread
from helpers.support import BuildOnce
from picompile_server.model import ServedModel

# Where `make test-slow` has installed them.
sys.path += filter(None, [os.environ.get("PICOMPILE_TEST_CLIENTS")])

pytestmark = pytest.mark.slow("imports clients, some of them large, and starts a server")

STRICT: Any = {"_strict_response_validation": True, "api_key": "none", "max_retries": 0}
CALL = '<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call>'
FIRST = f"<think>\nThe lamp.\n</think>\n\nLet me see.\n{CALL}"
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SWITCH: Any = {"type": "function", "name": "switch", "description": "A lamp.", "parameters": PARAMETERS, "strict": True}
QUESTION = "Is the lamp on?"


@pytest.fixture
def agent() -> ServedModel:
    """A model that calls `switch`, and says what came of it."""
    model = agent_model("")
    scheduler: Any = model.scheduler

    def says(request: Any) -> list[int]:
        prompt = str(model.tokenizer.decode(request.prompt))
        return text_tokens("It is on." if "[tool:" in prompt else FIRST)

    scheduler.says = says
    return model


@pytest.fixture
def url(agent: ServedModel) -> Iterator[str]:
    with serving_thread(client_of(agent).app) as found:
        yield f"{found}/v1"


@pytest.fixture(scope="module")
def real(build_once: BuildOnce) -> Iterator[ServingProcess]:
    """A server of a model of random weights, which knows a chat template and no tools."""
    with serving("--model", f"tiny={build_chat_artifact(build_once)}") as found:
        yield found


def test_openai_reads_items_and_hands_them_back(url: str, agent: ServedModel) -> None:
    with OpenAI(base_url=url, **STRICT) as client:
        asked: Any = [{"role": "user", "content": QUESTION}]
        response = client.responses.create(model="fake", input=asked, tools=[SWITCH])
        reasoning, message, call = response.output
        assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
        assert reasoning.content[0].text == "The lamp." and response.output_text == "Let me see."
        asked += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}]
        assert client.responses.create(model="fake", input=asked, tools=[SWITCH]).output_text == "It is on."
        expected = '[assistant:<think>The lamp.</think>Let me see.!switch{"on": true}][tool:yes]'
        assert prompt_of(agent).endswith(expected)


def test_openai_reads_the_events_of_a_response(url: str) -> None:
    with OpenAI(base_url=url, **STRICT) as client:
        options: Any = {"model": "fake", "input": QUESTION, "tools": [SWITCH]}
        with client.responses.stream(**options) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.usage.output_tokens_details.reasoning_tokens > 10


def test_openai_reads_reasoning_in_chats(url: str) -> None:
    with OpenAI(base_url=url, **STRICT) as client:
        asked: Any = {"model": "fake", "messages": [{"role": "user", "content": QUESTION}]}
        message: Any = client.chat.completions.create(**asked).choices[0].message
        assert message.reasoning_content == "The lamp."
        chunks = list(client.chat.completions.create(**asked, stream=True))
        thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
        assert "".join(thoughts) == "The lamp."


def agents_sdk() -> Any:
    found = pytest.importorskip("agents", reason="needs openai-agents; make test-slow installs it")
    found.set_tracing_disabled(True)
    return found


def make_agent(
    sdk: Any, kind: str, client: AsyncOpenAI, name: str, behavior: Any = "run_llm_again", **settings: Any
) -> tuple[Any, list[bool]]:
    """An agent of the SDK with a function tool, and what the tool was called with."""
    calls: list[bool] = []

    @sdk.function_tool
    def switch(on: bool) -> str:
        """Turn a lamp on or off."""
        calls.append(on)
        return "done"

    model_class = {"responses": sdk.OpenAIResponsesModel, "chat": sdk.OpenAIChatCompletionsModel}[kind]
    return (
        sdk.Agent(
            name="lamps",
            instructions="You turn lamps on.",
            model=model_class(model=name, openai_client=client),
            model_settings=sdk.ModelSettings(**settings),
            tools=[switch],
            tool_use_behavior=behavior,
        ),
        calls,
    )


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_an_agent_of_openais_sdk_calls_a_tool_and_answers(
    url: str, agent: ServedModel, kind: str, is_streamed: bool
) -> None:
    sdk = agents_sdk()

    async def run() -> tuple[Any, list[bool]]:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            lamps, calls = make_agent(sdk, kind, client, "fake", parallel_tool_calls=True)
            if not is_streamed:
                return await sdk.Runner.run(lamps, QUESTION), calls
            result = sdk.Runner.run_streamed(lamps, QUESTION)
            async for _ in result.stream_events():
                pass
            return result, calls

    result, calls = asyncio.run(run())
    assert result.final_output == "It is on." and calls == [True]
    kinds = [type(item).__name__ for item in result.new_items]
    assert "ReasoningItem" in kinds and kinds[-1] == "MessageOutputItem" and "ToolCallOutputItem" in kinds
    assert prompt_of(agent).startswith("[system:You turn lamps on.")
    assert '!switch{"on": true}' in prompt_of(agent) and prompt_of(agent).endswith("[tool:done]")


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_an_agent_runs_on_a_model_that_must_call_its_tool(real: ServingProcess, kind: str) -> None:
    sdk = agents_sdk()

    async def run() -> list[bool]:
        async with AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none") as client:
            settings = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "temperature": 0}
            lamps, calls = make_agent(sdk, kind, client, "tiny", "stop_on_first_tool", **settings)
            await sdk.Runner.run(lamps, QUESTION)
            return calls

    assert len(asyncio.run(run())) == 1


def test_openai_gets_a_call_from_a_model_that_must(real: ServingProcess) -> None:
    with OpenAI(base_url=f"{real.url}/v1", **STRICT) as client:
        options: Any = {"model": "tiny", "input": QUESTION, "tools": [SWITCH], "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "name": "switch"}):
            (call,) = client.responses.create(**options, tool_choice=choice, temperature=0).output
            assert call.type == "function_call" and set(json.loads(call.arguments)) == {"on"}
        with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
            client.responses.create(**options, previous_response_id="resp_1")


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_binds_tools(url: str, agent: ServedModel, responses: bool) -> None:
    pytest.importorskip("langchain_openai", reason="needs langchain-openai; make test-slow installs it")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="fake", base_url=url, api_key="none", use_responses_api=responses).bind_tools(  # type: ignore[arg-type]
        [{"type": "function", "function": {key: SWITCH[key] for key in ("name", "description", "parameters")}}]
    )
    chat: list[Any] = [HumanMessage(QUESTION)]
    called = model.invoke(chat)
    (call,) = called.tool_calls
    assert call["name"] == "switch" and call["args"] == {"on": True}
    chat += [called, ToolMessage("done", tool_call_id=call["id"])]
    assert model.invoke(chat).text == "It is on." and "[tool:done]" in prompt_of(agent)
    streamed = list(model.stream([HumanMessage(QUESTION)]))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == {"on": True}


def test_langchain_gets_structured_output(real: ServingProcess) -> None:
    pytest.importorskip("langchain_openai", reason="needs langchain-openai; make test-slow installs it")
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{real.url}/v1", api_key="none", temperature=0)  # type: ignore[arg-type]
    schema = {"title": "Lamp", "description": "A lamp.", **PARAMETERS}
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(schema, method=method).invoke(QUESTION)  # type: ignore[arg-type]
        assert isinstance(found, dict) and isinstance(found["on"], bool)


def test_litellm_completes_and_responds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="needs litellm; make test-slow installs it")
    options: Any = {"model": "openai/fake", "api_base": url, "api_key": "none"}
    tool = {"type": "function", "function": {key: SWITCH[key] for key in ("name", "description", "parameters")}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(**options, messages=messages, tools=[tool]).choices[0].message
    assert message.reasoning_content == "The lamp." and message.tool_calls[0].function.name == "switch"
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}]
    assert litellm.completion(**options, messages=messages, tools=[tool]).choices[0].message.content == "It is on."
    chunks = list(litellm.completion(**options, messages=messages[:1], tools=[tool], stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
    assert json.loads(rebuilt.tool_calls[0].function.arguments) == {"on": True}
    response = litellm.responses(**options, input=QUESTION, tools=[SWITCH])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_client_calls_a_tool_and_goes_on(url: str, agent: ServedModel, is_streamed: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs anthropic; make test-slow installs it")
    options: Any = {"model": "fake", "max_tokens": 500, "system": "You turn lamps on."}
    options["tools"] = [{"name": "switch", "description": "A lamp.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), **STRICT) as client:
        if is_streamed:
            with client.messages.stream(**options, messages=messages) as stream:
                assert "".join(stream.text_stream) == "Let me see."
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options, messages=messages)
        thinking, text, use = message.content
        assert (thinking.thinking, text.text, use.name, use.input) == (
            "The lamp.",
            "Let me see.",
            "switch",
            {"on": True},
        )
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 20
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**options, messages=messages).content[0].text == "It is on."
        assert '[assistant:<think>The lamp.</think>Let me see.!switch{"on": true}][tool:done]' in prompt_of(agent)
        counted = client.messages.count_tokens(model="fake", messages=messages, system=options["system"])
        assert counted.input_tokens > 50
        with pytest.raises(anthropic.BadRequestError, match="should be greater than or equal to 1"):
            client.messages.create(**{**options, "max_tokens": 0}, messages=messages)
