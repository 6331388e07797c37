"""The formats in which models write tool calls: the texts around a function's name and its JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """The texts around the calls that a model writes.

    An answer with two calls is: begin, before_name, name, before_arguments, arguments, after_arguments, between,
    before_name, …, after_arguments, end.

    Attributes:
        name: what it is known as.
        trigger: the beginning of a first call. In an answer that may call or not, a call is what begins with it.
        is_whole: whether a call is the whole answer, with no text before it: the trigger is one at the beginning only.
        before: a token that may come before a call, which has no text.
        most_calls: how many calls an answer may have.
        has_short_ids: whether the template wants ids of nine letters and digits.
    """

    name: str
    trigger: str
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    begin: str = ""
    between: str = ""
    end: str = ""
    is_whole: bool = False
    before: str = ""
    # A model that cannot stop must not call for ever.
    most_calls: int = 32
    has_short_ids: bool = False

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of some calls, each of a function's name and its arguments as JSON."""
        texts = (
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_arguments}"
            for name, arguments in calls
        )
        return f"{self.begin}{self.between.join(texts)}{self.end}"

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in calls besides names and arguments."""
        return self.begin, self.before_name, self.before_arguments, self.after_arguments, self.between, self.end


# Hermes 2 Pro, Qwen 2.5 and 3, SmolLM 3; and models that know no tools are told of this one.
HERMES = ToolFormat(
    name="hermes",
    trigger="<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_arguments="}\n</tool_call>",
    between="\n",
)
# Llama 3.1 to 3.3, whose template refuses several calls in one message.
LLAMA = ToolFormat(
    name="llama",
    trigger='{"name"',
    before_arguments='", "parameters": ',
    is_whole=True,
    before="<|python_tag|>",
    most_calls=1,
)
# Mistral 7B v0.3, Nemo, Small 3.
MISTRAL = ToolFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    has_short_ids=True,
)
# Mistral from tokenizer v11 on: Small 3.2, Magistral, Devstral.
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    trigger="[TOOL_CALLS]",
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    has_short_ids=True,
)
# Granite 3.
GRANITE = ToolFormat(
    name="granite",
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
)
# Phi 4 mini.
PHI = ToolFormat(
    name="phi",
    trigger="<|tool_call|>",
    before_name='<|tool_call|>{"name": "',
    after_arguments="}<|/tool_call|>",
)
# DeepSeek R1 and V3.
DEEPSEEK = ToolFormat(
    name="deepseek",
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    after_arguments="\n```<｜tool▁call▁end｜>",
    between="\n",
    end="<｜tool▁calls▁end｜>",
)
# DeepSeek V3.1.
DEEPSEEK_PLAIN = ToolFormat(
    name="deepseek-plain",
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)

FORMATS = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, GRANITE, PHI, DEEPSEEK, DEEPSEEK_PLAIN)

# What a template has that writes calls so; the first that fits is the model's. Formats whose arguments are no JSON
# come first: they are known, and not supported (Qwen 3 Coder, GLM 4.5).
_SIGNS: tuple[tuple[Callable[[str], bool], ToolFormat | None], ...] = (
    (lambda text: "<tool_call>" in text and ("<function=" in text or "<arg_key>" in text), None),
    (lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text, MISTRAL_ARGS),
    (lambda text: "[TOOL_CALLS]" in text, MISTRAL),
    (lambda text: "<｜tool▁calls▁begin｜>" in text and "```json" in text, DEEPSEEK),
    (lambda text: "<｜tool▁calls▁begin｜>" in text, DEEPSEEK_PLAIN),
    (lambda text: "<|tool_call|>" in text and "<|/tool_call|>" in text, PHI),
    (lambda text: "<|tool_call|>" in text, GRANITE),
    (lambda text: "<tool_call>" in text, HERMES),
    (lambda text: re.search(r'\{"name": .*"parameters": ', text, re.DOTALL) is not None, LLAMA),
)


def find_format(template: str) -> ToolFormat | None:
    """Return the format of calls for the model with this chat template; None if it is not known."""
    return next((found for fits, found in _SIGNS if fits(template)), None)
