"""The tokenizer of a folder without a tokenizer.json: what transformers' class makes of older files."""

from pathlib import Path

from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer import library
from picompile.frontend.tokenizer.built import Built, known_special

# Files that hold a vocabulary.
SOURCES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tekken.json")


def build_of_class(folder: Path) -> Built:
    """Return what transformers' class makes of sources other than tokenizer.json."""
    try:
        tokenizer = library.chosen_class(folder)
    except library.CannotBuildError as error:
        raise UnsupportedModelError(
            f"{folder}: has no tokenizer.json, and transformers makes none of its other files: {error}"
        ) from error
    if not library.has_backend(tokenizer):
        raise UnsupportedModelError(
            f"{folder}: has no tokenizer.json, and {type(tokenizer).__name__} of transformers cannot write one; "
            "save it as a fast tokenizer"
        )
    backend = library.plain_backend(tokenizer)
    return Built(backend, str(backend.to_str()), known_special(tokenizer.special_tokens_map, backend))
