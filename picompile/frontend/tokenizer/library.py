"""Tokenizers as transformers builds them of a folder, and whether two of them read texts alike."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picompile.frontend import panics
from picompile.frontend.config import quiet_transformers
from picompile.frontend.messages import shown_ids, shown_text

# Fields of tokenizer_config.json that say which tokens there are, and not how a text is cut into them.
_NAMES_TOKENS = ("tokenizer_class", "auto_map", "added_tokens_decoder", "chat_template", "model_max_length")
_SUFFIXES = (".json", ".model", ".txt", ".tiktoken")
_TOKENS_SUFFIXES = ("_token", "_special_tokens")


@dataclass(frozen=True)
class Difference:
    """A text that two tokenizers cut into other tokens."""

    text: str
    first: Sequence[int]
    second: Sequence[int]

    def __str__(self) -> str:
        return f"{shown_text(self.text)} is {shown_ids(self.first)}, not {shown_ids(self.second)}"


def chosen_class(folder: Path) -> Any:
    """Return the tokenizer of the class that transformers chooses, without code of the checkpoint's own.

    Raises `CannotBuildError`.
    """
    from transformers import AutoTokenizer

    with guarded():
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, mistral_format=False, split_special_tokens=False
        )


def of_file(folder: Path, **options: Any) -> Any:
    """Return the tokenizer of tokenizer.json with the folder's other files laid over it, and nothing of any class.

    Args:
        folder: the checkpoint's.
        options: options that stand above those of its tokenizer_config.json.

    Raises `CannotBuildError`.
    """
    from transformers import PreTrainedTokenizerFast

    options = {"local_files_only": True, "split_special_tokens": False, **options}
    with guarded():
        return PreTrainedTokenizerFast.from_pretrained(folder, **options)


def chosen_class_without_options(folder: Path, config: dict[str, Any]) -> Any:
    """Return what `chosen_class` does, for a folder whose tokenizer_config.json names tokens and has no options.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.
    """
    kept = {key: value for key, value in config.items() if key in _NAMES_TOKENS or key.endswith(_TOKENS_SUFFIXES)}
    kept = {key: value for key, value in kept.items() if type(value) is not bool}
    with copied(folder, {"tokenizer_config.json": json.dumps(kept)}) as copy:
        return chosen_class(copy)


@contextmanager
def copied(folder: Path, changed: Mapping[str, str]) -> Iterator[Path]:
    """Yield a folder of links to the files of a tokenizer in `folder`, and of files with the texts of `changed`."""
    with tempfile.TemporaryDirectory(prefix="picompile-tokenizer-") as name:
        copy = Path(name)
        for path in folder.iterdir():
            if path.suffix in _SUFFIXES and path.name not in changed and path.is_file():
                os.symlink(path.resolve(), copy / path.name)
        for file, text in changed.items():
            (copy / file).write_text(text, encoding="utf-8")
        yield copy


def add_special(backend: Any, texts: Iterable[str]) -> None:
    """Have tokens of the vocabulary read as special tokens, where they are not yet."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in texts if text not in known])


def finding_whole(backend: Any) -> Any:
    """Return a tokenizer that finds added tokens in a text as it is, where a normalizer keeps them from being found.

    Tokens of added_tokens.json are searched for in the normalized text, by their normalized names. A normalizer that
    puts a space before a text puts one before the name too, so that it is found nowhere but at the beginning.
    """
    from tokenizers import AddedToken, Tokenizer

    added = sorted(backend.get_added_tokens_decoder().items())
    encodings = backend.encode_batch(
        [f"a {token.content}" if token.single_word else f"a{token.content}" for _, token in added],
        add_special_tokens=False,
    )
    found = zip(added, encodings, strict=True)
    lost = [token for (number, token), encoding in found if token.normalized and number not in encoding.ids]
    if not lost:
        return backend
    backend.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=token.special,
            )
            for token in lost
        ]
    )
    return Tokenizer.from_str(backend.to_str())  # what was added twice is in one of its tables as it was before


def has_backend(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers is one of the tokenizers package underneath."""
    return hasattr(getattr(tokenizer, "backend_tokenizer", None), "to_str")


def plain_backend(tokenizer: Any) -> Any:
    """Return the tokenizer of the tokenizers package under one of transformers, which cuts and fills up nothing."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def first_difference(first: Any, second: Any, texts: Sequence[str]) -> Difference | None:
    """Return the first text that two tokenizers of the tokenizers package cut otherwise; None if there is none.

    They are compared with the tokens that each puts around a text, and without. Raises `CannotBuildError` where one of
    them fails on a text.
    """
    for around in (False, True):
        with guarded():
            both = [each.encode_batch(texts, add_special_tokens=around) for each in (first, second)]
        for text, ours, theirs in zip(texts, *both, strict=True):
            if ours.ids != theirs.ids:
                return Difference(text, ours.ids, theirs.ids)
    return None


@contextmanager
def guarded() -> Iterator[None]:
    """Raise whatever transformers and tokenizers raise as `CannotBuildError`, and print nothing of theirs."""
    with panics.guarded(), quiet_transformers():
        yield
