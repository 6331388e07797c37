"""Read what programs that somebody built print: llama-bench's rows, and the times of PowerInfer's `main`."""

import json
import re
from dataclasses import dataclass
from typing import Any

# As llama_print_timings writes it: "prompt eval time = 226.67 ms / 8 tokens", "eval time = 2305.34 ms / 63 runs".
_TIMED = re.compile(r"^\S+:\s+(prompt )?eval time =\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)\b", re.MULTILINE)
_SYSTEM = re.compile(r"^system_info: (.+)$", re.MULTILINE)
_MOST_CHARACTERS = 80


class OutputError(Exception):
    """An output that cannot be read. The text is one line."""


@dataclass(frozen=True)
class Reading:
    """A speed that a program printed, and what it said of itself and the machine."""

    tokens_per_s: float
    system: str


def llama_bench_rows(text: str) -> list[dict[str, Any]]:
    """Return the whole rows of `llama-bench -o json` or `-o jsonl`, that have a speed; other lines are ignored."""
    try:
        rows = json.loads(text)
    except ValueError:
        rows = list(filter(None, map(_row, text.splitlines())))
    rows = rows if isinstance(rows, list) else [rows]
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("avg_ts"), int | float)]


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def llama_bench_reading(text: str, is_prompt: bool) -> Reading:
    """Return the speed of the only row. Raises OutputError for another output, or a row of another test."""
    rows = llama_bench_rows(text)
    if len(rows) != 1 or rows[0]["avg_ts"] <= 0:
        raise OutputError(f"{len(rows)} rows of llama-bench with a speed, not one, in {_begin(text)}")
    (row,) = rows
    if bool(row.get("n_gen")) == is_prompt:
        raise OutputError(
            f"a row of llama-bench that {'has' if is_prompt else 'lacks'} generated tokens: {_begin(text)}"
        )
    return Reading(float(row["avg_ts"]), f"build {row.get('build_commit')}, {row.get('cpu_info')}")


def printed_timings_reading(text: str, is_prompt: bool) -> Reading:
    """Return the speed in the times that llama.cpp's `main` prints at its end. Raises OutputError if there is none."""
    for prompt, milliseconds, tokens in _TIMED.findall(text):
        if bool(prompt) == is_prompt and float(milliseconds) > 0:
            system = _SYSTEM.search(text)
            return Reading(1000 * int(tokens) / float(milliseconds), system[1].strip(" |") if system else "")
    raise OutputError(f"no line '{'prompt ' if is_prompt else ''}eval time = … ms / …' in {_begin(text)}")


def _begin(text: str) -> str:
    """Return how a text begins, as one line."""
    words = " ".join(text.split())
    return repr(words[:_MOST_CHARACTERS]) + ("…" if len(words) > _MOST_CHARACTERS else "")
