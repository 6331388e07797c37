"""The form in which a chat template reads messages: content as a text or in parts, and which roles may come where.

Templates of models that read images, as SmolVLM's, LLaVA's and Idefics', loop over the parts of a content and write
nothing of a text. vLLM finds the form by the template's syntax (`chat_template_content_format`); here it is tried.

Agents write chats that some templates reject: all of them begin with a system message, which Gemma 2 does not know,
Claude Code sends one behind the user's as well, and Codex two messages of the user in a row.
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

# Roles that tell the model what to do.
_INSTRUCTING = ("system", "developer")

Message = Mapping[str, Any]


class MessageForm:
    """One template's form of messages. It is tried on small chats when the first chat is rendered."""

    def __init__(self, template: str, render: Callable[[Sequence[Message]], str]) -> None:
        """Make the form of `template`; `render` returns the text of a chat, "" where the template rejects it."""
        self._template, self._render = template, render

    def fit(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as the template reads them.

        - Content that is a text becomes a list of one part where the template reads parts alone.
        - The role `developer` becomes `system`, as OpenAI treats them alike, unless the template knows it.
        - Where the template rejects any system message, it becomes the user's.
        - Where the template rejects or leaves out a system message behind another message, one at the beginning is
          joined to that before it, and a later one becomes the user's.
        - Where the template rejects two messages of the user in a row, they are joined.
        """
        chat: list[dict[str, Any]] = []
        for message in map(dict, messages):
            self._give_role(message, chat)
            if self._is_joined(message, chat):
                chat[-1]["content"] += f"\n\n{message['content']}"
            else:
                chat.append(message)
        return [self._in_form(message) for message in chat]

    def _give_role(self, message: dict[str, Any], before: Sequence[Message]) -> None:
        """Give a message the role that the template reads behind the messages `before`."""
        if message.get("role") == "developer" and not self._has_developer:
            message["role"] = "system"
        if message.get("role") not in _INSTRUCTING:
            return
        is_later = any(each.get("role") not in _INSTRUCTING for each in before)
        if self._rejects_system or (is_later and not self._reads_later_system):
            message["role"] = "user"

    def _is_joined(self, message: Message, before: Sequence[Message]) -> bool:
        """Return whether a message is a part of the last one `before`."""
        if not before or before[-1].get("role") != message.get("role"):
            return False
        if not isinstance(message.get("content"), str) or not isinstance(before[-1].get("content"), str):
            return False
        role = message.get("role")
        return (role == "user" and not self._reads_user_twice) or (
            role in _INSTRUCTING and not self._reads_later_system
        )

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if isinstance(role, str) and isinstance(message.get("content"), str) and self._reads_parts(role):
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

    @cached_property
    def _rejects_system(self) -> bool:
        """Whether the template takes no system message, but takes the user's."""
        return not self._render([self._system, self._question]) and bool(self._render([self._question]))

    @cached_property
    def _reads_later_system(self) -> bool:
        """Whether the template writes a system message that comes behind the user's."""
        later = {"role": "system", "content": _parts(_NEEDLE) if self._system_in_parts else _NEEDLE}
        return _NEEDLE in self._render([self._system, self._question, later])

    @cached_property
    def _reads_user_twice(self) -> bool:
        """Whether the template writes a message of the user that comes behind another one of the user."""
        later = {"role": "user", "content": _parts(_NEEDLE) if self._questions_in_parts else _NEEDLE}
        return _NEEDLE in self._render([self._question, later])

    @property
    def _system(self) -> Message:
        return {"role": "system", "content": _parts("s") if self._system_in_parts else "s"}

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
