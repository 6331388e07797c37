"""The tokenizer of a Hugging Face folder: every file of it that decides how text is cut, resolved into one definition.

tokenizer.json is the definition, with the tokens that other files add. transformers' class is what it is compared with,
and decides alone where there is no tokenizer.json.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.end_tokens import with_end_tokens
from picompile.frontend.json_file import read_json_object, read_text, token_ids
from picompile.frontend.stand_ins import refuse_stand_in
from picompile.frontend.tokenizer import library
from picompile.frontend.tokenizer.complete import Source
from picompile.frontend.tokenizer.probes import probe_texts
from picompile.frontend.tokenizer.templates import TEMPLATE_FILES, folder_templates
from picompile.frontend.tokenizer_files import TokenizerFiles

# Without tokenizer.json, transformers can build a tokenizer of one of these.
_SLOW_SOURCES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
_TOKENS = ("added_tokens.json", "special_tokens_map.json")
_DESCRIPTIONS = ("tokenizer_config.json", "generation_config.json", *_TOKENS)
# Where transformers' class reads tokenizer.json otherwise, the file stands: it is what the model's authors published,
# and what transformers 4, vLLM and llama.cpp's converter read. Cases: huggingface/transformers#45488 and #45920.
_FILE_STANDS = "transformers' {name} reads tokenizer.json otherwise: {difference}; tokenizer.json stands"

# The largest that is known, Gemma's, has 33 MB.
_MOST_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True)
class _Built:
    """A tokenizer, its text, the names of its special tokens, and lines for the user."""

    backend: Any
    text: str
    special: Mapping[str, str]
    notes: tuple[str, ...]


def read_folder(folder: Path) -> tuple[TokenizerFiles, Source]:
    """Return the tokenizer of a Hugging Face folder, and what it was read from.

    Raises `UnsupportedModelError`, in one line, for files that cannot be read, that contradict each other, or that
    transformers builds no tokenizer of.
    """
    _check_files(folder)
    config, generation, *_ = (_read_description(folder / name) for name in _DESCRIPTIONS)
    ends = token_ids(generation, "eos_token_id", folder / "generation_config.json")
    generation = with_end_tokens(generation, ends)
    templates = folder_templates(folder, config)
    if not (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in _SLOW_SOURCES):
        return TokenizerFiles(generation_config=generation), Source()
    built = _of_file(folder, config) if (folder / "tokenizer.json").is_file() else _of_class(folder)
    _check_ids(folder, config, built.backend)
    description = {"tokenizer_class": "PreTrainedTokenizerFast", **built.special, **templates}
    notes = (*built.notes, *_unread(folder, built))
    files = TokenizerFiles(built.text, description, generation, notes=notes)
    return files, Source(built.backend, built.special)


def _check_files(folder: Path) -> None:
    """Refuse links to nowhere, and folders in a file's place: nobody would hear that the file was not read."""
    for name in ("tokenizer.json", *_DESCRIPTIONS, *TEMPLATE_FILES, *_SLOW_SOURCES):
        path = folder / name
        if (path.exists() or path.is_symlink()) and not path.is_file():
            raise UnsupportedModelError(f"{path}: is no file, or a link to nowhere; the model would have no {name}")
        refuse_stand_in(path)


def _read_description(file: Path) -> dict[str, Any]:
    return read_json_object(file, _MOST_TOKENIZER_BYTES) if file.is_file() else {}


def _check_ids(folder: Path, config: Mapping[str, Any], backend: Any) -> None:
    """Refuse added tokens whose ids contradict the vocabulary: transformers counts on from its end, in silence."""
    for file, text, number in _listed_ids(folder, config):
        found = backend.token_to_id(text) if isinstance(text, str) else None
        if found is not None and str(found) != str(number):
            raise UnsupportedModelError(
                f"{folder / file}: the added token {text!r} has the id {number}, but is {found} in the vocabulary; "
                "tokens beyond the vocabulary must follow it without a gap"
            )


def _listed_ids(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the file, the text and the id of each added token that a file lists with its id."""
    if (folder / "tokenizer.json").is_file():
        for token in json.loads(read_text(folder / "tokenizer.json", _MOST_TOKENIZER_BYTES)).get("added_tokens") or ():
            yield "tokenizer.json", token["content"], token["id"]
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        for number, token in listed.items():
            yield "tokenizer_config.json", token.get("content") if isinstance(token, Mapping) else token, number
        return
    for text, number in _read_description(folder / _TOKENS[0]).items():
        yield _TOKENS[0], text, number


def _of_class(folder: Path) -> _Built:
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
    return _Built(backend, str(backend.to_str()), _known(tokenizer.special_tokens_map, backend), ())


def _of_file(folder: Path, config: Mapping[str, Any]) -> _Built:
    """Return the tokenizer of tokenizer.json, with what other files add, compared with that of transformers' class."""
    file = folder / "tokenizer.json"
    original = read_text(file, _MOST_TOKENIZER_BYTES)
    plain = library.parsed(original, str(file))
    try:
        tokenizer = library.of_file(folder)
    except library.CannotBuildError as error:
        raise UnsupportedModelError(f"{folder}: no tokenizer can be made of its files: {error}") from error
    backend, special = library.plain_backend(tokenizer), dict(tokenizer.special_tokens_map)
    if plain.post_processor is None:
        backend.post_processor = None  # transformers gives it one that adds nothing
    notes: tuple[str, ...] = ()
    try:
        chosen = library.chosen_class(folder)
    except library.CannotBuildError as error:
        notes = (f"{folder}: tokenizer.json is read as it is, since transformers' class for it fails: {error}",)
        return _Built(backend, _text(backend, plain, original), special, notes)
    if library.has_backend(chosen):
        special = _known(chosen.special_tokens_map, backend)
        library.add_special(backend, special.values())
        backend, notes = _settled(folder, config, backend, chosen)
    return _Built(backend, _text(backend, plain, original), special, notes)


def _known(special: Mapping[str, str], backend: Any) -> dict[str, str]:
    """Return the special tokens that the vocabulary has: classes add others of their own, without a row."""
    return {name: text for name, text in special.items() if backend.token_to_id(text) is not None}


def _settled(folder: Path, config: Mapping[str, Any], backend: Any, chosen: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer that holds where transformers' class may read tokenizer.json otherwise, and a line of it.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.
        backend: the tokenizer of tokenizer.json.
        chosen: that of transformers' class.
    """
    theirs = library.plain_backend(chosen)
    if theirs.to_str() == backend.to_str():
        return backend, ()
    texts = probe_texts(backend)
    difference = library.first_difference(theirs, backend, texts)
    if difference is None:
        return backend, ()
    try:
        unmodified = library.plain_backend(library.chosen_class_without_options(folder, dict(config)))
        if library.first_difference(unmodified, backend, texts) is None:
            return theirs, ()  # options of tokenizer_config.json, such as add_prefix_space, make the difference
    except library.CannotBuildError:
        pass
    name = type(chosen).__name__
    return backend, (f"{folder}: {_FILE_STANDS.format(name=name, difference=difference)}",)


def _text(backend: Any, plain: Any, original: str) -> str:
    """Return the text of a tokenizer: that of the file where nothing is changed."""
    text = str(backend.to_str())
    return original if text == plain.to_str() else text


def _unread(folder: Path, built: _Built) -> Iterator[str]:
    """Yield a line for each file whose tokens are not in the tokenizer, since transformers does not read it either."""
    added, named = (_read_description(folder / name) for name in _TOKENS)
    missing = sorted(name for name in added if built.backend.token_to_id(name) is None)
    if missing:
        yield f"{folder}: added_tokens.json has {missing[0]!r}, which tokenizer_config.json leaves out; it is no token"
    for name in ("bos_token", "eos_token"):
        value = named.get(name)
        text, taken = value.get("content") if isinstance(value, Mapping) else value, built.special.get(name)
        if isinstance(text, str) and text != taken:
            yield f"{folder}: special_tokens_map.json has {name} {text!r}; tokenizer_config.json holds, with {taken!r}"
