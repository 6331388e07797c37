"""The tokenizer of a folder whose vocabulary is in none of the usual files: transformers' class may know its file.

Models were published so before tokenizer.json, as BERT's decoders with vocab.txt; others have a tokenizer of their own,
as Qwen 1 with qwen.tiktoken.
"""

from fnmatch import fnmatch
from pathlib import Path

from picompile.errors import UnsupportedModelError
from picompile.frontend.panics import CannotBuildError
from picompile.frontend.stand_ins import refuse_stand_in
from picompile.frontend.tokenizer import library
from picompile.frontend.tokenizer.built import Built
from picompile.frontend.tokenizer.other_sources import built_of_class

# Names that files of vocabularies have, in small letters.
_PATTERNS = (
    *("*vocab*.txt", "*vocab*.json", "*.vocab", "dict.txt", "encoder.json", "merges.txt", "bpe.codes", "*.bpe"),
    *("*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.tokenizer", "tokenizer.bin"),
)
_WITHOUT = "the model is prompted with token ids; add its tokenizer.json for texts"
_SHOWN = 3


def build_of_unlisted(folder: Path) -> Built | str:
    """Return the tokenizer that transformers' class builds of a folder's vocabulary, or a line on why there is none.

    Raises `UnsupportedModelError` for a file that is a link to nowhere, or stands in for one.
    """
    names = _vocabulary_files(folder)
    if not names:
        return f"{folder}: has no file of a tokenizer, such as tokenizer.json; {_WITHOUT}"
    unread = f"{folder}: no tokenizer is made of {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
    try:
        tokenizer = library.chosen_class(folder)
    except CannotBuildError as error:
        return f"{unread}: {str(error).partition('. ')[0]}; {_WITHOUT}"
    name = type(tokenizer).__name__
    if not set(names) & set(getattr(tokenizer, "vocab_files_names", {}).values()):
        return f"{unread}: transformers chooses {name}, which reads no such file; {_WITHOUT}"
    if not library.has_backend(tokenizer):
        return f"{unread}: {name} of transformers cannot write a tokenizer.json; {_WITHOUT}"
    return built_of_class(tokenizer)


def _vocabulary_files(folder: Path) -> list[str]:
    """Return the names of the files that may hold a vocabulary, by their names."""
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    found = [name for name in names if any(fnmatch(name.lower(), pattern) for pattern in _PATTERNS)]
    for name in found:
        if not (folder / name).is_file():
            raise UnsupportedModelError(f"{folder / name}: is a link to nowhere; the model would have no tokenizer")
        refuse_stand_in(folder / name)
    return found
