"""Chat templates: Jinja programs that came with a model, rendered in a sandbox as transformers renders them.

Jinja's sandbox keeps a template from reading files and other objects, but not from running forever. So a separate
process renders it, with limited memory and time. It is started for the first chat and ends with the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picompile_runtime.errors import RequestError
from picompile_runtime.limited_process import LimitedProcess
from picompile_runtime.request_checks import shown
from picompile_runtime.sampling.message_form import MessageForm

# A usual rendering takes less than a hundredth of each.
LIMITS = {"cpu_s": 5, "memory_bytes": 2**29, "letters": 2**22}
_HANDLER = Path(__file__).with_name("template_worker.py")

# For models that came without a template, which have seen such dialogues in texts, but no tokens that mark turns.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content | trim }}"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content | trim }}"
    "{% else %}User: {{ message.content | trim }}{% endif %}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Such a model goes on with the next turn itself, and has no end token there.
PLAIN_STOPS = ("\nUser:", "\nAssistant:")

# What a template is rendered with besides the arguments of the caller.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
# Names of the same part of a message: transformers fills the first, which templates read, from the others.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A model's template. `config` is tokenizer_config.json, whose special tokens a template may use."""

    def __init__(self, template: str, config: Mapping[str, Any]) -> None:
        self.text = template
        start = {"template": template, "tokens": _special_tokens(config)}
        self._process = LimitedProcess("the chat template", _HANDLER, start, LIMITS)
        self._form = MessageForm(template, self._tried)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: each has `role` and `content`, which are given in the form that the template reads; keys whose
                value is None are left out.
            add_generation_prompt: whether to end with the beginning of the assistant's answer.
            tools: what the model may call, as OpenAI's API describes tools; None if it is offered none.
            arguments: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: `messages` are not JSON objects, or the template rejects them or exceeds a limit.
        """
        own = {"tools": _json("tools", tools), "add_generation_prompt": bool(add_generation_prompt)}
        variables = {"documents": None, **_arguments(arguments), **own}
        try:
            given = _json("messages", [_message(message) for message in messages])
        except Exception as error:  # whatever json or a caller's object raises
            must = "messages must be a list of JSON objects"
            raise RequestError(f"{must}, not {shown(messages)}") from error
        answer = self._process.ask({**variables, "messages": self.fit(given)})
        if "error" in answer:
            raise RequestError(f"the model's chat template rejects these messages: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the process that renders; the next chat starts another."""
        self._process.close()

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in the form that the template reads, see `MessageForm.fit`.

        Raises RequestError if the template exceeds a limit.
        """
        return self._form.fit(messages)

    def _tried(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of messages as they are, "" where the template rejects them."""
        variables = {"documents": None, "tools": None, "add_generation_prompt": False}
        return str(self._process.ask({**variables, "messages": list(messages)}).get("text", ""))


def named_templates(config: Mapping[str, Any], file: str = "") -> dict[str, str]:
    """Return a model's templates by name: `default`, and others such as `tool_use`.

    Args:
        config: tokenizer_config.json; its `chat_template` is a text, or a list of names and texts.
        file: the text of chat_template.jinja, which counts instead if there is one, as with transformers.
    """
    given = file or config.get("chat_template")
    if isinstance(given, str):
        return {"default": given} if given else {}
    if not isinstance(given, list):
        return {}
    entries = [entry for entry in given if isinstance(entry, Mapping)]
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    found = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str) and text}
    if found and "default" not in found:
        found["default"] = next(iter(found.values()))
    return found


def _arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"arguments of a chat template must be a JSON object, not {shown(given)}")
    for name in _OWN_VARIABLES:
        if name in given:
            raise RequestError(f"{name} cannot be an argument of a chat template; give it by itself")
    return dict(_json("arguments of a chat template", given))


def _json(what: str, value: Any) -> Any:
    """Return a caller's value as plain JSON types. Raises RequestError if it is not JSON."""
    try:
        return json.loads(json.dumps(value, default=_plain))
    except Exception as error:
        raise RequestError(f"{what} must be JSON, not {shown(value)}") from error


def _plain(value: Any) -> Any:
    """Return a mapping that is no dict as a dict, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as transformers hands it to templates, many of which fail at a value of None."""
    content = {key: value for key, value in dict(message).items() if value is not None}
    reasoning = next((content[name] for name in _REASONING if name in content), None)
    return content if reasoning is None else {"thinking": reasoning, **content, "reasoning_content": reasoning}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of tokenizer_config.json by name, such as `bos_token`."""
    named: dict[str, Any] = {name: value for name, value in config.items() if str(name).endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, Mapping) else {}
    contents = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in named.items()}
    return {str(name): text for name, text in contents.items() if isinstance(text, str)}
