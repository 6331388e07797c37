"""Prompts of chats: the token ids of messages, with the tools that are offered."""

from __future__ import annotations

import json

from picompile_server.http.ask import check_letters
from picompile_server.http.chat_body import ChatBody
from picompile_server.model import ServedModel
from picompile_server.tools import ToolOffer


async def encode_messages(
    body: ChatBody, model: ServedModel, offer: ToolOffer | None, add_generation_prompt: bool = True
) -> list[int]:
    """Return the token ids of a chat in which `offer` may be called. Raises RequestError and ApiError."""
    messages, arguments = body.template_messages(), body.template_arguments
    tools = None if offer is None else offer.template_tools
    # All that the template is given may come into the prompt.
    more = [each for each in (tools, arguments, *(message.get("tool_calls") for message in messages)) if each]
    texts = (value for message in messages for value in message.values() if isinstance(value, str))
    letters = sum(map(len, texts))
    check_letters(letters + sum(len(json.dumps(each, ensure_ascii=False)) for each in more), model)
    if not body.uses_tools:
        return await model.encode_chat(messages, add_generation_prompt, arguments=arguments)
    return await model.text_workers.run(
        lambda: model.tool_use.encode(messages, offer, add_generation_prompt, arguments=arguments)
    )
