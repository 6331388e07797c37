"""The grammar of an answer that calls tools, in llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from picompile_runtime.errors import RequestError
from picompile_server.grammar import GrammarCompiler
from picompile_server.request import Grammar
from picompile_server.tool_argument_grammar import argument_rules
from picompile_server.tool_format import ToolFormat
from picompile_server.tools import ToolFunction, ToolOffer

_ANY_TEXT = "/(?s:.*)/"
_PATIENCE_S = 10.0  # for schemas of one request, tried one by one


def tool_grammar(
    compiler: GrammarCompiler,
    style: ToolFormat,
    offer: ToolOffer,
    special_tokens: Mapping[str, int],
) -> Callable[[], Grammar]:
    """Return a maker of the grammar of answers that call offered tools, with arguments that satisfy the schemas.

    Args:
        compiler: the model's.
        style: how the model writes calls.
        offer: the functions, and whether the answer may be text instead.
        special_tokens: ids of the tokens that are no text; a grammar names them by their ids.

    Raises:
        RequestError: a schema cannot be enforced, that of a function only if it is strict, or the grammar is too large.
    """

    def made(offer: ToolOffer) -> Callable[[], Grammar]:
        return compiler.grammar("list of tools", _lark(style, offer, special_tokens, compiler.has_end))

    try:
        return made(offer)
    except RequestError:
        end_s = time.monotonic() + _PATIENCE_S
        functions = tuple(_enforceable(compiler, function, end_s) for function in offer.functions)
        if functions == offer.functions:
            raise
        return made(replace(offer, functions=functions))


def _enforceable(compiler: GrammarCompiler, function: ToolFunction, end_s: float) -> ToolFunction:
    """Return a function whose schema can be enforced: if it is not strict, its own schema may be dropped."""
    if time.monotonic() > end_s:
        raise RequestError(f"the schemas of the tools take more than {_PATIENCE_S:.0f} s; give fewer, or simpler ones")
    try:
        compiler.json_schema(function.arguments_schema)
        return function
    except RequestError as error:
        if function.is_strict:
            raise RequestError(f"the parameters of {function.name}: {error}") from error
        return replace(function, parameters={})


def _lark(
    style: ToolFormat,
    offer: ToolOffer,
    special_tokens: Mapping[str, int],
    has_end: bool,
) -> str:
    def text(value: str) -> str:
        return lark_text(value, special_tokens)

    # Without an end token an answer can only end where nothing can follow.
    more = (min(style.most_calls, offer.most_calls) if has_end else 1) - 1
    bodies = []
    for number, function in enumerate(offer.functions):
        made = argument_rules(style.arguments, function, f"body{number}", text, special_tokens)
        number_text = '":" /[0-9]{1,4}/' if style.is_numbered else ""
        opening = f"{text(function.name)} {number_text} {text(style.before_arguments)}"
        bodies += [f"body{number}: {opening} {made.expression} {text(style.after_arguments)}", *made.rules]
    rest = f"(more{{0,{more}}}) {text(style.end)}" if more else text(style.end)
    rules = [
        f"body: {' | '.join(f'body{number}' for number in range(len(offer.functions)))}",
        *bodies,
        *([f"more: {text(style.between + style.before_name)} body"] if more else []),
    ]
    opening = style.begin + style.before_name
    if offer.mode == "required":
        return "\n".join([f"start: {text(opening)} body {rest}", *rules])
    behind = f"{text(opening[len(style.trigger) :])} body {rest}"
    return "\n".join([*_start(style, text(style.trigger), behind, special_tokens), *rules])


def _start(style: ToolFormat, trigger: str, behind: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Return the rules of an answer that is text, or has calls: the `trigger` and what is `behind` it."""
    if style.is_whole:
        before = f"({lark_text(style.before, special_tokens)})?" if style.before in special_tokens else ""
        named = f"({lark_text(style.before_text, special_tokens)})?" if style.before_text else ""
        other = f"OTHER: {_ANY_TEXT} & ~/{_escaped(style.trigger)}(?s:.*)/"
        return [f"start: {named} OTHER | {before} {trigger} {behind}", other]
    if style.trigger in special_tokens:
        return [f"start: TEXT | TEXT {trigger} {behind}", f"TEXT: {_ANY_TEXT}"]
    if (begin := min((style.trigger.find(name) for name in special_tokens if name in style.trigger), default=0)) > 0:
        # No text has that token, so what is before it in the trigger is the end of the text.
        lead, token = _escaped(style.trigger[:begin]), lark_text(style.trigger[begin:], special_tokens)
        return [f"start: TEXT | LEAD {token} {behind}", f"LEAD: /(?s:.*){lead}/", f"TEXT: {_ANY_TEXT}"]
    # lazy: the text ends at the first trigger
    return [f"start: TEXT | lead {behind}", f"lead[lazy]: TEXT {trigger}", f"TEXT: {_ANY_TEXT}"]


def lark_text(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a text, in which names of special tokens stand for the tokens."""
    names = sorted((name for name in special_tokens if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    written = (f"<[{special_tokens[part]}]>" if part in special_tokens else json.dumps(part) for part in parts if part)
    return " ".join(written)


def _escaped(text: str) -> str:
    """Return a regular expression of a text, for between slashes."""
    return re.escape(text).replace("/", r"\/")
