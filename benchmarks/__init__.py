"""Measurements of picompile, in folders by what they measure; run from the repository's folder with `python -m`."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, with `variables`, in which `python -m benchmarks...` works from any folder."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
