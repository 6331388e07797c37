"""Restrictions of an answer's tokens on request, and errors that say who is at fault if an answer cannot continue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError
from picompile_server.http.fields import JsonObjectFormat, NamedSchemaFormat, TextBody
from picompile_server.model import ServedModel
from picompile_server.request import Grammar

if TYPE_CHECKING:
    from picompile_server.grammar import GrammarCompiler

GrammarMaker = Callable[[], Grammar]


@dataclass
class WatchedGrammar:
    """Makes the grammars of a request's answers, and keeps why one of them could not go on.

    The scheduler ends such an answer as it does where the engine has failed. Here it is the request that is wrong.
    """

    maker: GrammarMaker
    failures: list[str] = field(default_factory=list)

    def __call__(self) -> Grammar:
        """Return the grammar of one answer."""
        try:
            return _Watched(self.maker(), self.failures)
        except RequestError as error:
            self.failures.append(str(error))
            raise


class _Watched:
    def __init__(self, grammar: Grammar, failures: list[str]) -> None:
        self._grammar, self._failures = grammar, failures

    def allowed(self) -> NDArray[np.bool_] | None:
        try:
            return self._grammar.allowed()
        except RequestError as error:
            self._failures.append(str(error))
            raise

    def accept(self, token: int) -> bool:
        try:
            return self._grammar.accept(token)
        except RequestError as error:
            self._failures.append(str(error))
            raise


async def grammar_of(body: TextBody, model: ServedModel) -> WatchedGrammar | None:
    """Return the restriction of the answers' tokens, None if the request asks for none. Raises RequestError."""
    if not asks_for_form(body):
        return None
    return WatchedGrammar(await model.grammar_workers.run(lambda: form_grammar(body, model.grammars)))


def asks_for_form(body: TextBody) -> bool:
    """Return whether a request prescribes the form of the text."""
    form = body.response_format
    wanted = (body.structured_outputs, body.json_schema, body.grammar)
    return any(each is not None for each in wanted) or (form is not None and form.type != "text")


def form_grammar(body: TextBody, grammars: GrammarCompiler) -> GrammarMaker:
    """Return a maker of the grammars of the form that a request prescribes. Raises RequestError."""
    form, wanted = body.response_format, body.structured_outputs
    if body.grammar is not None:
        return grammars.gbnf(body.grammar)
    if body.json_schema is not None:
        return grammars.json_schema(body.json_schema)
    if isinstance(form, NamedSchemaFormat):
        return grammars.json_schema(form.json_schema.schema_)
    if isinstance(form, JsonObjectFormat):
        return grammars.json_object() if form.schema_ is None else grammars.json_schema(form.schema_)
    if wanted is not None and wanted.json_ is not None:
        return grammars.json_schema(wanted.json_)
    if wanted is not None and wanted.regex is not None:
        return grammars.regex(wanted.regex)
    if wanted is not None and wanted.choice is not None:
        return grammars.choice(wanted.choice)
    return grammars.lark((wanted.grammar if wanted is not None else None) or "")
