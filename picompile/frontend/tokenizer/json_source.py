"""The tokenizer of a folder with a tokenizer.json: the file, what other files add to it, and what a class changes.

Where transformers' class reads the file otherwise, the file stands: it is what the model's authors published, and what
transformers 4, vLLM and llama.cpp's converter read. Such cases are huggingface/transformers#45488 and #45920. Options
of tokenizer_config.json that the class applies over the file, such as `add_prefix_space`, are taken.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.json_file import read_text
from picompile.frontend.panics import CannotBuildError
from picompile.frontend.tokenizer import library
from picompile.frontend.tokenizer.built import Built, known_special
from picompile.frontend.tokenizer.probes import probe_texts
from picompile.frontend.tokenizer.trial import try_file

FILE = "tokenizer.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# The option of tokenizer_config.json with which transformers replaces the split of tokenizer.json.
_MENDED = "fix_mistral_regex"
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# The largest that is known, Gemma's, has 33 MB.
MOST_TOKENIZER_BYTES = 256 << 20


def build_of_json(folder: Path, config: Mapping[str, Any]) -> Built:
    """Return the tokenizer of a folder's tokenizer.json.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.

    Raises `UnsupportedModelError` where the files are no tokenizer.
    """
    text = read_text(folder / FILE, MOST_TOKENIZER_BYTES)
    try_file(folder / FILE)
    try:
        tokenizer = library.of_file(folder)
        backend, special, notes, is_files = _read(folder, config, tokenizer)
        notes = (*notes, *_split_that_transformers_mends(folder, config, tokenizer))
        content = json.loads(text)
        if content.get("post_processor") is None:
            backend.post_processor = None  # transformers gives it one that adds nothing
    except CannotBuildError as error:
        raise UnsupportedModelError(f"{folder}: no tokenizer can be made of its files: {error}") from error
    listed = tuple((token["content"], token["id"]) for token in content.get("added_tokens") or ())
    return Built(backend, _text(backend, content, text, is_files), special, notes, listed)


def _read(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> tuple[Any, dict[str, str], tuple[str, ...], bool]:
    """Return the tokenizer, its named special tokens, notes, and whether it is that of the file.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.
        tokenizer: that of tokenizer.json, as `library.of_file` gives it.
    """
    backend, special = library.plain_backend(tokenizer), dict(tokenizer.special_tokens_map)
    with library.guarded():
        backend = library.finding_whole(backend)
    try:
        chosen = library.chosen_class(folder)
    except CannotBuildError as error:
        note = f"{folder}: {FILE} is read as it is, since transformers' class for it fails: {error}"
        return backend, special, (note,), True
    if not library.has_backend(chosen):
        return backend, special, (), True
    special = known_special(chosen.special_tokens_map, backend)
    library.add_special(backend, special.values())
    settled, notes = _settled(folder, config, backend, chosen)
    return settled, special, notes, settled is backend


def _split_that_transformers_mends(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> Iterator[str]:
    """Yield a line where transformers says that the file splits texts wrongly, and a text is split otherwise if mended.

    It says so of all folders of Mistral's that older versions saved (huggingface/transformers#42299), right ones too.
    """
    backend = library.plain_backend(tokenizer)
    if getattr(backend, _MENDED, None) is not False or _MENDED in config:
        return
    with library.guarded():
        texts = probe_texts(backend)
    mended = library.plain_backend(library.of_file(folder, **{_MENDED: True}))
    if difference := library.first_difference(backend, mended, texts):
        yield (
            f"{folder}: transformers says that {FILE} has a wrong regular expression, by which {difference}; "
            f'"{_MENDED}": true in tokenizer_config.json mends it'
        )


def _settled(folder: Path, config: Mapping[str, Any], backend: Any, chosen: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer that holds where transformers' class may read tokenizer.json otherwise, and a line of it.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.
        backend: the tokenizer of tokenizer.json.
        chosen: that of transformers' class.
    """
    with library.guarded():
        texts = probe_texts(backend)
    theirs = library.plain_backend(chosen)
    difference = library.first_difference(theirs, backend, texts)
    if difference is None:
        return backend, ()
    try:
        unmodified = library.plain_backend(library.chosen_class_without_options(folder, dict(config)))
        if library.first_difference(unmodified, backend, texts) is None:
            return theirs, ()
    except CannotBuildError:
        pass
    name = type(chosen).__name__
    note = f"{folder}: transformers' {name} reads {FILE} otherwise: {difference}; {FILE} stands"
    return backend, (note,)


def _text(backend: Any, content: Mapping[str, Any], text: str, is_files: bool) -> str:
    """Return the text of a tokenizer: that of the file where nothing of it was added or changed.

    Args:
        backend: the tokenizer.
        content: the contents of tokenizer.json.
        text: its text.
        is_files: whether the tokenizer is that of the file, but for added tokens and options that transformers applies.
    """
    tokens = content.get("added_tokens") or ()
    listed = {(token["content"], token["id"], *(token.get(flag) for flag in _FLAGS)) for token in tokens}
    added = backend.get_added_tokens_decoder().items()
    now = {(token.content, number, *(getattr(token, flag) for flag in _FLAGS)) for number, token in added}
    return text if is_files and now == listed and _has_parts(backend, content) else str(backend.to_str())


def _has_parts(backend: Any, content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer prepares, splits and decodes texts by the parts that a tokenizer.json has."""
    from tokenizers import Tokenizer

    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    files = Tokenizer.from_str(json.dumps(empty | {name: content.get(name) for name in _PARTS}))
    return all(_state(getattr(backend, name)) == _state(getattr(files, name)) for name in _PARTS)


def _state(part: Any) -> Any:
    return None if part is None else part.__getstate__()
