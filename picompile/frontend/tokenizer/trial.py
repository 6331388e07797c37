"""A tokenizer.json is first tried in a process of its own, since it may end the process that reads it, or never end.

It is a small program: a split is a regular expression, a normalizer may write a book for a letter, and some tables of
characters make the tokenizers package ask for all memory there is.
"""

from pathlib import Path

from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.probes import FIXED_TEXTS
from picompile_runtime.limited_process import LimitedProcess

# Gemma's takes three seconds and half a gibibyte.
_LIMITS = {"cpu_s": 60, "memory_bytes": 4 << 30}
# An allocation that fails ends the process.
_ENDED = "it fails"
_HANDLER = Path(__file__).with_name("trial_worker.py")


def try_file(file: Path) -> None:
    """Read a tokenizer.json, and have it encode and decode a few texts.

    Raises `UnsupportedModelError` for one that is no tokenizer, or takes too much.
    """
    process = LimitedProcess("the tokenizer", _HANDLER, {"file": str(file)}, _LIMITS)
    answer = process.ask({"texts": list(FIXED_TEXTS)})
    if "error" in answer:
        reason = "it takes too much memory" if answer["error"] == _ENDED else answer["error"]
        raise UnsupportedModelError(f"{file} is no tokenizer: {reason}")
