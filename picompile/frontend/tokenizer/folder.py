"""The tokenizer of a Hugging Face folder: every file of it that decides how text is cut, resolved into one definition.

tokenizer.json is the definition, with the tokens that other files add. transformers' class is what it is compared with,
and decides alone where there is no tokenizer.json.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.end_tokens import with_end_tokens
from picompile.frontend.generation_config import read_generation_config
from picompile.frontend.json_file import read_json_object, token_ids
from picompile.frontend.messages import shown_text
from picompile.frontend.stand_ins import refuse_stand_in
from picompile.frontend.tokenizer.built import Built
from picompile.frontend.tokenizer.complete import Source
from picompile.frontend.tokenizer.json_source import FILE, MOST_TOKENIZER_BYTES, build_of_json
from picompile.frontend.tokenizer.other_sources import SOURCES, build_without_json
from picompile.frontend.tokenizer.templates import TEMPLATE_FILES, folder_templates
from picompile.frontend.tokenizer.unlisted_sources import build_of_unlisted
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile_runtime.sampling.model_defaults import FILE as GENERATION_CONFIG

_TOKENS = ("added_tokens.json", "special_tokens_map.json")
_DESCRIPTIONS = ("tokenizer_config.json", *_TOKENS)


def read_folder(folder: Path) -> tuple[TokenizerFiles, Source]:
    """Return the tokenizer of a Hugging Face folder, and what it was read from.

    Raises `UnsupportedModelError`, in one line, for files that cannot be read, that contradict each other, or that
    transformers builds no tokenizer of.
    """
    _check_files(folder)
    config, *_ = (_read_description(folder / name) for name in _DESCRIPTIONS)
    file, generation = read_generation_config(folder)
    ends = token_ids(generation, "eos_token_id", file)
    generation = with_end_tokens(generation, ends)
    templates = folder_templates(folder, config)
    built = _built(folder, config)
    if isinstance(built, str):
        return TokenizerFiles(generation_config=generation, reason=built), Source()
    _check_ids(folder, config, built)
    description = {"tokenizer_class": "PreTrainedTokenizerFast", **built.special, **templates}
    notes = (*built.notes, *_unread(folder, built), *_not_applied(folder, config, built))
    files = TokenizerFiles(built.text, description, generation, notes=notes)
    return files, Source(built.backend, built.special)


def _built(folder: Path, config: Mapping[str, Any]) -> Built | str:
    """Return the tokenizer of the first files that hold one, or a line that says why there is none."""
    if (folder / FILE).is_file():
        return build_of_json(folder, config)
    if any((folder / name).is_file() for name in SOURCES):
        return build_without_json(folder, config)
    return build_of_unlisted(folder)


def _check_files(folder: Path) -> None:
    """Refuse links to nowhere, and folders in a file's place: nobody would hear that the file was not read."""
    for name in (FILE, GENERATION_CONFIG, *_DESCRIPTIONS, *TEMPLATE_FILES, *SOURCES):
        path = folder / name
        if (path.exists() or path.is_symlink()) and not path.is_file():
            raise UnsupportedModelError(f"{path}: is no file, or a link to nowhere; the model would have no {name}")
        refuse_stand_in(path)


def _read_description(file: Path) -> dict[str, Any]:
    return read_json_object(file, MOST_TOKENIZER_BYTES) if file.is_file() else {}


def _check_ids(folder: Path, config: Mapping[str, Any], built: Built) -> None:
    """Refuse added tokens whose ids contradict the vocabulary: transformers counts on from its end, in silence."""
    for file, text, number in _listed_ids(folder, config, built):
        found = built.backend.token_to_id(text) if isinstance(text, str) else None
        if found is not None and str(found) != str(number):
            raise UnsupportedModelError(
                f"{folder / file}: the added token {shown_text(text)} has the id {number}, but is {found} in the "
                "vocabulary; tokens beyond the vocabulary must follow it without a gap"
            )


def _listed_ids(folder: Path, config: Mapping[str, Any], built: Built) -> Iterator[tuple[str, Any, Any]]:
    """Yield the file, the text and the id of each added token that a file lists with its id."""
    yield from ((FILE, text, number) for text, number in built.listed)
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        for number, token in listed.items():
            yield "tokenizer_config.json", token.get("content") if isinstance(token, Mapping) else token, number
        return
    for text, number in _read_description(folder / _TOKENS[0]).items():
        yield _TOKENS[0], text, number


def _unread(folder: Path, built: Built) -> Iterator[str]:
    """Yield a line for each file whose tokens are not in the tokenizer, since transformers does not read it either."""
    added, named = (_read_description(folder / name) for name in _TOKENS)
    missing = sorted(name for name in added if built.backend.token_to_id(name) is None)
    if missing:
        shown = shown_text(missing[0])
        yield f"{folder}: added_tokens.json has {shown}, which tokenizer_config.json leaves out; it is no token"
    for name in ("bos_token", "eos_token"):
        value = named.get(name)
        text, taken = value.get("content") if isinstance(value, Mapping) else value, built.special.get(name)
        if isinstance(text, str) and text != taken:
            yield f"{folder}: special_tokens_map.json has {name} {text!r}; tokenizer_config.json holds, with {taken!r}"


def _not_applied(folder: Path, config: Mapping[str, Any], built: Built) -> Iterator[str]:
    """Yield a line for each option of tokenizer_config.json that a tokenizer.json cannot hold."""
    where = f"{folder}: tokenizer_config.json has"
    if config.get("split_special_tokens"):
        yield f"{where} split_special_tokens, which is not applied: special tokens in a text are special"
    # transformers itself does not apply it to merged pieces.
    if config.get("clean_up_tokenization_spaces") and type(built.backend.model).__name__ != "BPE":
        yield f"{where} clean_up_tokenization_spaces, which is not applied: answers have the spaces that were written"
