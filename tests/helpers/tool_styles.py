"""The formats of tool calls as parameters of tests: one of each kind is fast."""

from typing import Any

import pytest

from picompile_server.tool_format import ToolFormat
from picompile_server.tool_formats import FORMATS

_LIKE_OTHERS = {
    **dict.fromkeys(("hermes-dense", "nemotron", "tagged-list"), "like hermes and granite"),
    **dict.fromkeys(("seed", "glm", "minimax"), "like qwen-xml and glm-dense"),
    "deepseek-dsml-calls": "like deepseek-dsml",
    **dict.fromkeys(("olmo", "llama-python"), "like lfm"),
}


def _parameter(style: ToolFormat) -> Any:
    like = _LIKE_OTHERS.get(style.name)
    return pytest.param(style, id=style.name, marks=[pytest.mark.slow(like)] if like is not None else [])


STYLES = [_parameter(style) for style in FORMATS]
