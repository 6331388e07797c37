"""Rendering of a chat template in a process under limits; see chat_template.py and limited_worker.py.

It imports nothing of this package: the process has other things to load.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any


def handler(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that renders `start["template"]`: it takes a template's variables and answers with `text`.

    `start["tokens"]` are the special tokens by name, `start["limits"]["letters"]` the most characters of a text.
    """
    compiled = _environment().from_string(start["template"])
    most_letters = start["limits"]["letters"]

    def render(variables: Mapping[str, Any]) -> Mapping[str, Any]:
        pieces, letters = [], 0
        for piece in compiled.generate({**start["tokens"], **variables}):
            pieces.append(piece)
            letters += len(piece)
            if letters > most_letters:
                raise ValueError(f"the text has more than {most_letters} characters")
        return {"text": "".join(pieces)}

    return render


def _environment() -> Any:
    """Return the environment of transformers (utils/chat_template_utils.py), since templates are written for it."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag around what the model wrote. It marks tokens to train on, and changes no text."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """A template's namespace. Names that begin with an underscore could reach Python's own."""

        def __init__(*arguments: Any, **named: Any) -> None:
            jinja2.utils.Namespace.__init__(arguments[0])
            for name, value in dict(*arguments[1:], **named).items():
                arguments[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot have {name!r}")
            super().__setitem__(name, value)

    class Dict:
        """A template's `dict`. The type itself has more to offer."""

        def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
            return dict(*arguments, **named)

        def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
            return dict.fromkeys(*arguments)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = Dict()
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
