"""Chat templates: Jinja programs that came with a model, rendered in a sandbox as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from picompile_runtime.errors import RequestError


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], config: Mapping[str, Any], add_generation_prompt: bool
) -> str:
    """The text of a chat. `config` is tokenizer_config.json, whose special tokens a template may name."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The environment is that of transformers, utils/chat_template_utils.py, since templates are written for it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **tokens
        )
    except Exception as error:  # a template is a program, and can fail like any other
        raise RequestError(
            f"the model's chat template refuses these messages: {' '.join(str(error).split())}"
        ) from error


def _content(token: Any) -> Any:
    """A special token is written as a text or as an object that has one."""
    return token.get("content") if isinstance(token, Mapping) else token
