"""The form in which a chat template reads messages: content as a text or in parts, and the role `developer` or not.

Templates of models that read images, as SmolVLM's, LLaVA's and Idefics', loop over the parts of a content and write
nothing of a text. vLLM finds the form by the template's syntax (`chat_template_content_format`); here it is tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

# A text that no template contains, and a role of the same length as `developer` that none knows.
_NEEDLE, _UNKNOWN = "picompileneedle", "otherrole"
# Templates that read parts name the member of a part.
_NAMES_TEXT = re.compile(r"""['"]text['"]|\.text\b""")
# A part that is written as a value, by Python or as JSON.
_WHOLE_PART = re.compile(r"""['"]type['"]:""")

Message = Mapping[str, Any]


class MessageForm:
    """One template's form of messages. It is tried on small chats when the first chat is rendered."""

    def __init__(self, template: str, render: Callable[[Sequence[Message]], str]) -> None:
        """Make the form of `template`; `render` returns the text of a chat, "" where the template rejects it."""
        self._template, self._render = template, render

    def fit(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as the template reads them.

        Content that is a text becomes a list of one part where the template reads parts alone. The role `developer`
        becomes `system`, as OpenAI treats them alike, unless the template knows it.
        """
        return [self._fitted(dict(message)) for message in messages]

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if not isinstance(role, str):
            return message
        if role == "developer" and not self._has_developer:
            role = message["role"] = "system"
        if isinstance(message.get("content"), str) and self._reads_parts(role):
            message["content"] = _parts(message["content"])
        return message

    def _reads_parts(self, role: str) -> bool:
        if role == "system":
            return self._system_in_parts
        return self._answers_in_parts if role == "assistant" else self._questions_in_parts

    @cached_property
    def _questions_in_parts(self) -> bool:
        return self._needs_parts(lambda content: [{"role": "user", "content": content}])

    @cached_property
    def _answers_in_parts(self) -> bool:
        return self._needs_parts(lambda content: [self._question, {"role": "assistant", "content": content}])

    @cached_property
    def _system_in_parts(self) -> bool:
        return self._needs_parts(lambda content: [{"role": "system", "content": content}, self._question])

    @cached_property
    def _has_developer(self) -> bool:
        """Whether the template writes the role `developer` otherwise than a role that it does not know."""
        if "developer" not in self._template:
            return False
        content = _parts(_NEEDLE) if self._questions_in_parts else _NEEDLE
        written, unknown = (
            self._render([{"role": role, "content": content}, self._question]) for role in ("developer", _UNKNOWN)
        )
        return _NEEDLE in written and written != unknown.replace(_UNKNOWN, "developer")

    @property
    def _question(self) -> Message:
        return {"role": "user", "content": _parts("u") if self._questions_in_parts else "u"}

    def _needs_parts(self, chat: Callable[[Any], Sequence[Message]]) -> bool:
        """Return whether the template writes the text of a part in a chat, and nothing of a plain text."""
        if _NAMES_TEXT.search(self._template) is None or _NEEDLE in self._render(chat(_NEEDLE)):
            return False
        written = self._render(chat(_parts(_NEEDLE)))
        return _NEEDLE in written and _WHOLE_PART.search(written) is None


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
