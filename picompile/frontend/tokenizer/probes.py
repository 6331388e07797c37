"""Texts and chats on which tokenizers are compared: fixed ones, and texts drawn from a vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

# Digits, spaces, line breaks, scripts, code, contractions: what splits and normalizers treat in ways of their own.
FIXED_TEXTS = (
    "Hello world",
    " leading space",
    "  two  spaces   three    four",
    "trailing  ",
    "\n",
    "a\n\nb\n \n  c\r\nd\te\t\tf",
    "1 12 123 1234 12345 1,234.5 007 2024-01-31",
    "it's I'm you'LL WE'D o'clock",
    "HTTPServer camelCase snake_case kebab-case UPPER",
    "for i in range(10):\n    print(f'{i:03d}')\n\treturn {\"a\": [1, 2]}",
    "x!=y && z<=w -> (a|b)*c // d; #!$%^&",
    "https://example.com/a?b=c&d=%20",
    "naïve café Ångström ﬁ ① Ⅷ ﾊﾝ",
    "cafe\u0301 n\u0303o",
    "Привет мир, как дела?",
    "日本語のテキスト。中文字符，測試",
    "한국어 텍스트",
    "العربية نص",
    "हिन्दी पाठ",
    "ไทย",
    "emoji 👩‍👩‍👧 🇩🇪 👍🏽",
    "\u00a0no\u2009thin\u3000wide\u200bzero",
    "▁under▁score <0x0A> Ġ",
    "…“quoted”—dash",
    "the the the the",
    "",
)
_DRAWN, _SPECIAL = 200, 100
_LONGEST, _SEED = 8, 49


def probe_texts(tokenizer: Any) -> list[str]:
    """Return the texts for a tokenizer of the tokenizers package, the same ones for the same vocabulary."""
    draw = Random(_SEED)
    ids = range(tokenizer.get_vocab_size(with_added_tokens=False))
    special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    return [*FIXED_TEXTS, *_from_vocabulary(tokenizer, ids, draw), *_with_special(special, draw)]


def _from_vocabulary(tokenizer: Any, ids: Sequence[int], draw: Random) -> list[str]:
    """Return texts of tokens that are drawn, which a tokenizer may cut otherwise when it reads them."""
    if not ids:
        return []
    drawn = [[draw.choice(ids) for _ in range(draw.randint(1, _LONGEST))] for _ in range(_DRAWN)]
    return list(tokenizer.decode_batch(drawn, skip_special_tokens=False))


def _with_special(special: Sequence[str], draw: Random) -> list[str]:
    """Return special tokens alone, in a row, and beside text."""
    if not special:
        return []
    chosen = special if len(special) <= _SPECIAL else draw.sample(special, _SPECIAL)
    rows = ["".join(draw.choice(special) for _ in range(4)) for _ in range(_SPECIAL // 4)]
    beside = ("a{}b", " {} ", "{}\n\n{}", "x {}  y", "\n{} 1")
    mixed = [draw.choice(beside).format(draw.choice(special), draw.choice(special)) for _ in range(_SPECIAL)]
    return [*chosen, *rows, *mixed]


@dataclass(frozen=True)
class ProbeChat:
    """A chat that a template is tried with; `what` says in a few words what is in it."""

    what: str
    messages: Sequence[Mapping[str, Any]]
    prompt: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what


_SYSTEM = {"role": "system", "content": "Be brief. <&> é"}
# The user asks this in nearly all chats, and templates may trim it.
QUESTION = "What is 2+2?"
_USER = {"role": "user", "content": f" {QUESTION}\n"}
_ANSWER = {"role": "assistant", "content": "It is 4. "}
_THOUGHT = {**_ANSWER, "reasoning_content": "2 and 2"}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": [1, None, True], "c": "<é>"}},
}
_CALLS = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "4"}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "<one>"}}, "required": ["a"]}
_TOOLS = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _PARAMETERS}},)

PROBE_CHATS = (
    ProbeChat("of one question", (_USER,)),
    ProbeChat("of one question without the answer's beginning", (_USER,), prompt=False),
    ProbeChat("with a system prompt", (_SYSTEM, _USER)),
    ProbeChat("of three turns", (_USER, _ANSWER, _USER)),
    ProbeChat("that ends with an answer", (_SYSTEM, _USER, _ANSWER), prompt=False),
    ProbeChat("with reasoning", (_USER, _THOUGHT, _USER)),
    ProbeChat("without thinking", (_USER,), arguments={"enable_thinking": False}),
    ProbeChat("with thinking", (_USER,), arguments={"enable_thinking": True, "thinking": True}),
    ProbeChat("with tools", (_SYSTEM, _USER), tools=_TOOLS),
    ProbeChat("with a tool's call and result", (_USER, _CALLS, _RESULT), tools=_TOOLS),
    ProbeChat("with a tool's call after reasoning", (_USER, {**_CALLS, "reasoning_content": "add"}, _RESULT)),
    ProbeChat("of parts", ({"role": "user", "content": [{"type": "text", "text": "Hi"}]},)),
    ProbeChat("of two questions", (_USER, _USER)),
)
