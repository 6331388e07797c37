"""The name of a model on the hub, as users write it in place of a path.

| written | means |
| --- | --- |
| `Qwen/Qwen3-0.6B` | the repository, at the head of its branch `main` |
| `unsloth/Qwen3-0.6B-GGUF:Q4_K_M` | the GGUF file of that format in it |
| `Qwen/Qwen3-0.6B@v1.1` | a branch, a tag or a commit |
| `hf://Qwen/Qwen3-0.6B`, `hf.co/…`, `https://huggingface.co/…` | the same repository, whatever folders there are here |
| `hf://org/repo/file.gguf` | one GGUF file of a repository |
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from picompile.errors import UsageError

MAIN = "main"

_PREFIX = re.compile(r"(?:hf://|(?:https?://)?(?:huggingface\.co|hf\.co)/)", re.IGNORECASE)
_REPO = r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
_REVISION = r"(?:@(?P<revision>[\w./-]+))?"
_NAME = re.compile(rf"{_REPO}{_REVISION}(?::(?P<choice>[\w.-]+))?", re.ASCII)
_FILE = re.compile(rf"{_REPO}{_REVISION}/(?P<choice>[\w./ -]+\.gguf)", re.ASCII | re.IGNORECASE)
# The address of a page of the hub.
_PAGE = re.compile(
    rf"{_REPO}/(?:blob|resolve|tree)/(?P<revision>[\w.-]+)(?:/(?P<choice>[\w./ -]+\.gguf))?(?:\?.*)?", re.ASCII
)
FORMS = "ORG/REPO, ORG/REPO:Q4_K_M or hf://ORG/REPO/FILE.gguf"


@dataclass(frozen=True)
class ModelName:
    """A repository of the hub, and which of its models is meant.

    Attributes:
        repo: `organization/repository`.
        revision: a branch, a tag or a commit.
        choice: which GGUF file: the name of its format, as in `Q4_K_M`, or its path in the repository. None leaves the
            choice to `picompile.hub.listing`.
    """

    repo: str
    revision: str = MAIN
    choice: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        if self.choice is None:
            return f"{self.repo}{revision}"
        if self.choice.lower().endswith(".gguf"):
            return f"hf://{self.repo}{revision}/{self.choice}"
        return f"{self.repo}{revision}:{self.choice}"


def parse_model(text: str) -> ModelName | Path:
    """Return what `text` means as a MODEL: a path, or the name of a model on the hub.

    A path that exists comes first. A text such as `models/tiny` is a path, too, if there is a folder `models` here:
    a mistyped path is not looked up on the hub. `hf://` makes a text a name in any case.

    Raises:
        UsageError: the text begins as a name and is none.
    """
    prefix = _PREFIX.match(text)
    if prefix is not None:
        rest = text[prefix.end() :].rstrip("/")
        match = _PAGE.fullmatch(rest) or _FILE.fullmatch(rest) or _NAME.fullmatch(rest)
        if match is None:
            raise UsageError(f"{text}: no name of a model; write {FORMS}")
        return _named(match)
    match = _NAME.fullmatch(text)
    if match is None or os.path.lexists(text) or Path(text).parent.is_dir():
        return Path(text)
    return _named(match)


def hidden_name(text: str) -> str:
    """Return what a message adds where `text` would be a name but for a folder that is here; else an empty text."""
    if _NAME.fullmatch(text) is None or not Path(text).parent.is_dir():
        return ""
    return f" (there is a folder {Path(text).parent} here, so {text} is a path; hf://{text} is a name)"


def _named(match: re.Match[str]) -> ModelName:
    choice = match["choice"]
    # Formats are written in capitals or not; with one spelling, a model has one name.
    if choice is not None and not choice.lower().endswith(".gguf"):
        choice = choice.upper()
    return ModelName(match["repo"], match["revision"] or MAIN, choice)
