"""A model as users name it: a Hugging Face folder, or a GGUF file."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.frontend.activation import with_activation
from picompile.frontend.json_file import read_json_object

if TYPE_CHECKING:
    from picompile.frontend.gguf.model import GgufModel
    from picompile.frontend.tokenizer_files import TokenizerFiles


def is_gguf(model: Path) -> bool:
    """Return whether `model` is a file, which only a GGUF file may be."""
    return model.is_file()


def read_config(model: Path, activation: str | None = None) -> dict[str, Any]:
    """Return the contents of config.json, or what a GGUF file has in its place.

    With an `activation` they name that one: every reader of a model takes its config from here. Raises
    `UnsupportedModelError`, in one line, for what is damaged, and what `with_activation` raises.
    """
    raw = opened_gguf(model).config if is_gguf(model) else read_json_object(model / "config.json")
    return with_activation(raw, activation)


def opened_gguf(file: Path) -> "GgufModel":
    """Return the model in a GGUF file, which is read once as long as it does not change; raises as `open_gguf` does."""
    status = file.stat()
    return _opened(file.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _opened(file: Path, changed_ns: int, size: int) -> "GgufModel":
    from picompile.frontend.gguf.model import open_gguf

    return open_gguf(file)


@lru_cache(maxsize=1)
def gguf_tokenizer(opened: "GgufModel") -> "TokenizerFiles":
    """Return the tokenizer in a GGUF file; raises as `read_gguf_tokenizer` does."""
    from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(opened.header)
