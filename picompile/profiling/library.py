"""The text there is without being given any: sources and documents of the running Python's standard library.

About 3 % of the files, chosen by a hash of their names, are kept for measuring: those that examples/train_relu_lm.py
keeps from training as well.
"""

import hashlib
import platform
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from picompile.calibration import CalibrationText

_HELD_OUT_PERCENT = 3
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
# Tables, not text.
_SKIPPED_FILES = {"html/entities.py", "locale.py"}


# Of one file, so that a long one is not all there is.
_EXCERPT_CHARACTERS = 4096


def library_texts(held_out: bool, seed: int) -> Iterator[CalibrationText]:
    """An excerpt of each file that is held out, or of each of the others, read one by one.

    The seed draws the order and the places.
    """
    root, topics = Path(sysconfig.get_path("stdlib")), _topics()
    names = [name for name in (*_source_names(root), *topics) if is_held_out(name) == held_out]
    draw = random.Random(seed)
    draw.shuffle(names)
    for name in names:
        text = topics[name] if name in topics else (root / name).read_bytes().decode("utf-8", errors="replace")
        if text.strip():
            yield CalibrationText(name, _excerpt(text, draw))


def _excerpt(text: str, draw: random.Random) -> str:
    """Whole lines from a random place on."""
    start = draw.randint(0, max(0, len(text) - _EXCERPT_CHARACTERS))
    start = text.find("\n", start) + 1 if start else 0
    return text[start : start + _EXCERPT_CHARACTERS]


def library_name() -> str:
    """What the library is called where it is spoken of."""
    return f"Python {platform.python_version()}'s standard library"


def is_held_out(name: str) -> bool:
    """Whether a file only measures, by its name alone: the same for every machine and Python version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT


def _source_names(root: Path) -> list[str]:
    """The library's modules, relative to its folder, less tests and generated tables; sorted."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(
        path.as_posix()
        for path in paths
        if _SKIPPED_FOLDERS.isdisjoint(path.parts)
        and path.as_posix() not in _SKIPPED_FILES
        and not path.name.startswith("_sysconfigdata")
    )


def _topics() -> dict[str, str]:
    """The topics of the language reference, which some distributions leave out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {f"topics/{name}": str(text) for name, text in sorted(topics.items())}
