"""Tools of a chat: functions that the model may call, and whether it may call any, must call one, or a given one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "unevaluatedProperties")


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model may call.

    Attributes:
        name: letters, digits and `_-.`, up to 64.
        description: what it is for.
        parameters: the JSON schema of its arguments, which are an object.
        is_strict: whether arguments must satisfy the schema even if a part of it cannot be enforced; then the request
            is refused. Else such a function's arguments are any object, as OpenAI's are without `strict`.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema that arguments are held to: of `parameters`, and with no properties that these do not name.

        Any others would do if the schema does not say otherwise, and small models never come to an end of them.
        """
        schema = {"type": "object", **self.parameters}
        is_open = "properties" in schema and not any(key in schema for key in _COMBINED)
        return {**schema, "additionalProperties": False} if is_open else schema


@dataclass(frozen=True)
class ToolOffer:
    """The functions that the model is offered in one request, and whether it must call one.

    Attributes:
        functions: which it may call, one or more.
        mode: "auto" if it may call or not, "required" if it must call.
        most_calls: how many calls an answer may have.
        described: which the prompt describes; None for those that it may call. What is the same in every turn of a chat
            is reused.
    """

    functions: tuple[ToolFunction, ...]
    mode: Literal["auto", "required"] = "auto"
    most_calls: int = 32
    described: tuple[ToolFunction, ...] | None = None

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The functions as OpenAI's API and chat templates describe tools."""
        described = (
            {
                "name": function.name,
                "description": function.description,
                # As given, for the model has seen schemas in that order; templates look into the properties.
                "parameters": dict(function.parameters or _NO_PARAMETERS),
            }
            for function in (self.functions if self.described is None else self.described)
        )
        return [{"type": "function", "function": function} for function in described]


def read_offer(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None = None, parallel: bool = True
) -> ToolOffer | None:
    """Return the tools that a request offers the model; None if it may call none.

    Args:
        tools: OpenAI's `tools`, whose form `ChatBody` checks.
        choice: OpenAI's `tool_choice`: "none", "auto", "required", the function that must be called, or those that may
            be (`allowed_tools`); None is "auto".
        parallel: OpenAI's `parallel_tool_calls`.

    Raises:
        RequestError: two functions have one name, the chosen one is not among them, or the parameters of one are no
            schema of an object.
    """
    functions = tuple(_function(**tool["function"]) for tool in tools or ())
    names = [function.name for function in functions]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise RequestError(f"two tools are called {twice}")
    if not functions or choice == "none":
        return None
    most_calls = ToolOffer.most_calls if parallel else 1
    if not isinstance(choice, Mapping):
        return ToolOffer(functions, "required" if choice == "required" else "auto", most_calls)
    allowed: Mapping[str, Any] = choice.get("allowed_tools", {"tools": [choice]})
    chosen = {tool["function"]["name"] for tool in allowed["tools"]}
    if unknown := chosen - set(names):
        raise RequestError(f"tool_choice names {shown(min(unknown))}, and the tools are {', '.join(names)}")
    callable_ones = tuple(function for function in functions if function.name in chosen)
    if choice["type"] == "function":
        return ToolOffer(callable_ones, "required", 1)
    return ToolOffer(callable_ones, allowed["mode"], most_calls, described=functions)


def _function(
    name: str, description: str | None = None, parameters: Mapping[str, Any] | None = None, strict: bool | None = None
) -> ToolFunction:
    if parameters is None:
        parameters = _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise RequestError(f"the parameters of {name} must be a JSON schema of an object, not {shown(parameters)}")
    return ToolFunction(name, description or "", parameters, strict is True)
