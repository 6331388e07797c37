"""Reading of a checkpoint's tokenizer: of a Hugging Face folder, or of a GGUF file."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from picompile.frontend.model_file import gguf_tokenizer, is_gguf, opened_gguf
from picompile.frontend.tokenizer.complete import Source, completed
from picompile.frontend.tokenizer.folder import read_folder
from picompile.frontend.tokenizer.templates import MORE_TEMPLATES
from picompile.frontend.tokenizer_files import TokenizerFiles


def read_tokenizer(model: Path | None, vocabulary: int) -> TokenizerFiles:
    """Return a checkpoint's tokenizer.

    Args:
        model: a Hugging Face folder or a GGUF file; None for a model without a checkpoint, which has no tokenizer.
        vocabulary: the number of tokens that the model has rows for.

    Raises:
        UnsupportedModelError: the tokenizer cannot be read, or cannot belong to the model.
    """
    if model is None:
        return TokenizerFiles()
    if is_gguf(model):
        return completed(gguf_tokenizer(opened_gguf(model)), model, vocabulary, Source(is_gguf=True))
    return _read_once(model.resolve(), model, vocabulary, _state(model))


@lru_cache(maxsize=1)
def _read_once(folder: Path, shown: Path, vocabulary: int, state: tuple[Any, ...]) -> TokenizerFiles:
    """Return a folder's tokenizer, which several steps of a compilation ask for; `state` tells changed files."""
    files, source = read_folder(shown)
    return completed(files, shown, vocabulary, source)


def _state(folder: Path) -> tuple[Any, ...]:
    """Return the names, times and sizes of the files that may belong to a tokenizer."""
    found = (*folder.glob("*"), *folder.glob(f"{MORE_TEMPLATES}/*"))
    files = sorted(path for path in found if path.suffix != ".safetensors" and path.is_file())
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
