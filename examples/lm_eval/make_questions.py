"""Writes the questions of python_names.yaml: which of four functions of a module does a docstring describe?

    python examples/lm_eval/make_questions.py [-o build/lm_eval/python_names.jsonl]

The text is that of the Python that runs this, so that nothing is downloaded.
"""

import argparse
import importlib
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = (
    *(
        "array",
        "base64",
        "bisect",
        "calendar",
        "cmath",
        "colorsys",
        "copy",
        "csv",
        "fnmatch",
        "functools",
        "gc",
        "glob",
    ),
    *("gzip", "heapq", "html", "inspect", "json", "keyword", "linecache", "locale", "math", "operator", "os", "pickle"),
    *("platform", "random", "re", "secrets", "shlex", "shutil", "signal", "socket", "statistics", "string", "struct"),
    *(
        "subprocess",
        "sys",
        "tempfile",
        "textwrap",
        "threading",
        "time",
        "tokenize",
        "types",
        "urllib.parse",
        "warnings",
    ),
)
CHOICES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/lm_eval/python_names.jsonl"))
    output = parser.parse_args().output
    rng = random.Random(0)
    asked = [question for module in MODULES for question in questions(module, rng)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(question) + "\n" for question in asked), encoding="utf-8")
    print(f"{output}: {len(asked)} questions")


def questions(module: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield a question for each function of a module whose description does not name it."""
    described = descriptions(module)
    for name, description in described.items():
        if name.lower() in description.lower():
            continue
        others = rng.sample(sorted(described.keys() - {name}), min(CHOICES, len(described)) - 1)
        choices = rng.sample([name, *others], len(others) + 1)
        if len(choices) == CHOICES:
            yield {
                "module": module,
                "description": description,
                "choices": choices,
                "answer": choices.index(name),
            }


def descriptions(module: str) -> dict[str, str]:
    """Return the first sentence about each public function of a module."""
    found = {}
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        if name.startswith("_") or not inspect.isroutine(value):
            continue
        # Functions in C begin with their signature.
        lines = [line for line in (inspect.getdoc(value) or "").splitlines() if line and "(" not in line]
        if lines and lines[0].endswith("."):
            found[name] = lines[0]
    return found


if __name__ == "__main__":
    main()
