"""Tool use of one model: its prompt describes the tools, a grammar restricts its answers, and a parser reads them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.tokenizer import Tokenizer
from picompile_server.grammar import GrammarCompiler
from picompile_server.request import Grammar
from picompile_server.tool_format import ToolFormat
from picompile_server.tool_formats import HERMES, PLAIN, find_format, format_of_call
from picompile_server.tool_grammar import tool_grammar
from picompile_server.tool_messages import (
    Message,
    begins_with_system,
    named_arguments,
    numbered_calls,
    reasoning_name,
    with_first_user,
    with_system,
    without_tool_roles,
    written_calls,
)
from picompile_server.tool_parser import ToolCallParser
from picompile_server.tools import ToolOffer

# For models whose template does not describe tools. The words are those of Hermes and Qwen, which others have read.
_DESCRIPTION = """# Tools

You may call one or more functions to help with the user's request. They are given here as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON, like this:
{example}"""
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


class ToolUse:
    """One model's way to use tools: as its template has it, and as Hermes has it for a template that knows no tools.

    What the template does is tried on small chats when it is needed first, which takes a moment: not for the loop.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def style(self) -> ToolFormat | None:
        """How the model writes calls; None if its template has another format than those that are known."""
        return self._own_style or (None if self.is_described else HERMES)

    @cached_property
    def _own_style(self) -> ToolFormat | None:
        """The format of the template's own text of a call, else the one that its words name; None if none is known."""
        named = find_format(self._template)
        if not self._writes_calls:
            return named
        text = self._rendered(self._sample)
        # A template may write spaces of its own, or have the words of a format and write calls otherwise.
        is_named = named is not None and (named.arguments is not None or named.proof in text)
        return format_of_call(text) or (named if is_named else None)

    @cached_property
    def shown_tokens(self) -> Mapping[int, str]:
        """Special tokens that calls are made of, and their texts, which the parser needs.

        Give them to the StreamDecoder of an answer that may call. For a format that is not known, they are those that
        the template writes with a call and not without one.
        """
        if self.style is not None:
            texts: tuple[str, ...] = self.style.texts
            others = ""
        else:
            texts, others = (self._rendered(self._sample),), self._rendered(_UNCALLED)
        special = self._tokenizer.special_tokens.items()
        return {number: name for name, number in special if name not in others and any(name in text for text in texts)}

    @cached_property
    def is_described(self) -> bool:
        """Whether the template describes the tools that it is given."""
        return mentions_tools(self._template) and self._shows("needle", [_QUESTION], [_NEEDLE_TOOL])

    @property
    def _template(self) -> str:
        return self._tokenizer.chat_template(with_tools=True)

    def encode(
        self,
        messages: Sequence[Message],
        offer: ToolOffer | None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat in which tools are offered, or were used before.

        Args:
            messages: as OpenAI's API has them, with texts for content. Arguments of calls are JSON.
            offer: what the model may call now; None for nothing.
            add_generation_prompt: whether to end with the beginning of the assistant's answer.
            arguments: further variables of the chat template.

        Raises:
            RequestError: arguments of a call are not JSON, or the template rejects the chat.
        """
        tools = offer.template_tools if offer is not None else None
        if self.style is not None and self.style.is_numbered:
            messages = numbered_calls(messages)
        is_known = self._own_style is not None or self.is_described or self._writes_turns
        chat = [self._with_calls(message) for message in messages] if is_known else without_tool_roles(messages)
        if tools is None or self.is_described:
            return self._encode(chat, tools, add_generation_prompt, arguments)
        described = self._description(tools)
        try:
            return self._encode(with_system(chat, described), None, add_generation_prompt, arguments)
        except RequestError:
            if begins_with_system(chat):
                raise
            # some templates have no system message, and say so
            return self._encode(with_first_user(chat, described), None, add_generation_prompt, arguments)

    def grammar(self, compiler: GrammarCompiler, offer: ToolOffer) -> Callable[[], Grammar] | None:
        """Return a maker of the grammar of answers to an offer; None if the format of calls is not known.

        Raises RequestError as `tool_grammar` does, and if a call is required in a format that is not known.
        """
        if self.style is None and offer.mode == "required":
            raise RequestError(
                "the model's chat template writes calls in a format that this server does not know, so none can be "
                "required; set tool_choice to auto, and read the calls from the content of the answer"
            )
        if self.style is None:
            return None
        return tool_grammar(compiler, self.style, offer, self._tokenizer.special_tokens)

    def parser(self, offer: ToolOffer) -> ToolCallParser | None:
        """Return a parser of one answer to an offer; None if the format of calls is not known."""
        schemas = {function.name: function.arguments_schema for function in offer.functions}
        return None if self.style is None else ToolCallParser(self.style, schemas)

    def _encode(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None,
    ) -> list[int]:
        return self._tokenizer.encode_chat(messages, add_generation_prompt, tools, arguments, plain=True)

    def _description(self, tools: Sequence[Mapping[str, Any]]) -> str:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = (self.style or HERMES).write([("function name", '{"parameter": "value"}')])
        return _DESCRIPTION.format(tools=listed, example=example)

    def _with_calls(self, message: Message) -> Message:
        """Return a message as the template wants it: with objects or texts for arguments, and ids of its length.

        If the template leaves calls out, they are in the content.
        """
        changed = dict(message)
        if message.get("tool_call_id") is not None:
            changed["tool_call_id"] = self._id(str(message["tool_call_id"]))
        if message.get("tool_calls"):
            if self._writes_calls:
                changed["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
                if message.get("content") is None:
                    changed["content"] = None if self._takes_no_content else ""
                elif (name := reasoning_name(message)) is not None and message["content"] and not self._takes_reasons:
                    changed |= {"content": "", name: f"{message[name]}\n\n{message['content']}"}
            else:
                calls = written_calls(self.style or PLAIN, changed.pop("tool_calls"))
                changed["content"] = f"{message.get('content') or ''}{calls}"
        return changed

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = named_arguments(call)
        written: Any = json.dumps(arguments, ensure_ascii=False) if self._takes_texts else arguments
        made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": written}}
        return made if call.get("id") is None else {**made, "id": self._id(str(call["id"]))}

    def _id(self, given: str) -> str:
        """Return an id that the template takes, the same one for the same id."""
        if self.style is None or not self.style.has_short_ids or _SHORT_ID.fullmatch(given):
            return given
        return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]

    @property
    def _sample(self) -> list[Message]:
        """A chat with a call, whose arguments are as the template takes them."""
        return _called('{"needle": 1}' if self._takes_texts else {"needle": 1})

    @cached_property
    def _writes_calls(self) -> bool:
        """Whether the template writes the calls of earlier turns, rather than leaving them out."""
        return self._shows("needle", _called({"needle": 1})) or self._shows("needle", _called('{"needle": 1}'))

    @cached_property
    def _writes_turns(self) -> bool:
        """Whether the template writes calls of earlier turns and their results, in whatever format."""
        result = {"role": "tool", "tool_call_id": "a" * 9, "name": "f", "content": "result"}
        return self._writes_calls and self._shows("result", [*self._sample, result])

    @cached_property
    def _takes_no_content(self) -> bool:
        """Whether the template writes a call without content: some add to it, and fail or write "None"."""
        question, answer = self._sample
        text = self._rendered([question, {**answer, "content": None}])
        return "needle" in text and "None" not in text

    @cached_property
    def _takes_reasons(self) -> bool:
        """Whether the template writes a call with content and reasoning: gpt-oss' refuses a message with both."""
        question, answer = self._sample
        return self._shows("needle", [question, {**answer, "content": "a", "reasoning_content": "r"}])

    @cached_property
    def _takes_texts(self) -> bool:
        """Whether the template wants arguments as JSON: most write JSON themselves, of objects. It is tried."""
        of_object = self._rendered(_called({"needle": 1}))
        # Others write an object member by member, and texts in another way; "{'needle'" is Python's own text of it.
        if _WRITTEN in of_object or ("needle" in of_object and "{'needle'" not in of_object):
            return False
        return self._shows(_WRITTEN, _called(f"{{{_WRITTEN}}}"))

    def _shows(self, text: str, chat: Sequence[Message], tools: Sequence[Message] = ()) -> bool:
        """Return whether the template writes `text` somewhere in a chat."""
        return text in self._rendered(chat, tools)

    def _rendered(self, chat: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return the text of a chat; none if the template rejects it."""
        try:
            return self._tokenizer.render_chat(chat, False, tools=tools)
        except RequestError:
            return ""


_WRITTEN = '"needle": 1'
_QUESTION: Message = {"role": "user", "content": "u"}
_UNCALLED: list[Message] = [_QUESTION, {"role": "assistant", "content": "a"}]
_NEEDLE_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "needle",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"p": {"type": "string", "description": "d"}},
            "required": ["p"],
        },
    },
}


def _called(arguments: object) -> list[Message]:
    """Return a chat in which a function was called."""
    call = {"id": "a" * 9, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]


def mentions_tools(template: str) -> bool:
    """Return whether a template may describe tools: it has the variable, or a word like it."""
    return re.search(r"\btools\b", template) is not None
