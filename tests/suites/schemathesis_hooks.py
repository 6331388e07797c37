"""Hooks of schemathesis, so that more of its requests are answered by the model; responses are counted.

Seven of eight bodies name the served model instead of one that is made up, and half of them lose most of their optional
fields: with all of them at a time, one is nearly always wrong or forbids another.
"""

from __future__ import annotations

import atexit
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

_NEEDED = frozenset(("model", "prompt", "messages", "input", "content", "tokens"))
_RESPONSES: Counter[str] = Counter()


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Return the body that is sent instead of one that was made up."""
    if not isinstance(body, dict):
        return body
    choice = random.Random(json.dumps(body, sort_keys=True, default=str))
    if choice.random() < 0.5:
        body = {key: value for key, value in body.items() if key in _NEEDED or choice.random() < 0.15}
    if "model" in body and choice.random() < 7 / 8:
        body["model"] = os.environ["SUITE_MODEL"]
    return body


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Count a response."""
    _RESPONSES[f"{case.operation.method.upper()} {case.operation.path}: {response.status_code}"] += 1


@atexit.register
def _write() -> None:
    Path(os.environ["SUITE_RESPONSES"]).write_text(json.dumps(_RESPONSES), encoding="utf-8")
