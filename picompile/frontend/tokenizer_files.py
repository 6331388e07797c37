"""The tokenizer of a checkpoint, as the runtime wants it: `tokenizer.json` and what belongs to it."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.errors import UnsupportedModelError
from picompile.frontend.config import one_line, quiet_transformers
from picompile.frontend.json_file import read_json_object, read_text, token_ids
from picompile.frontend.model_file import gguf_tokenizer, is_gguf, opened_gguf

if TYPE_CHECKING:
    from picompile.frontend.gguf.tokenizer import GgufTokenizer

_COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Without tokenizer.json, transformers can still build a fast tokenizer from one of these.
_SLOW_SOURCES = ("tokenizer.model", "vocab.json", "spiece.model")

# The largest that is known, Gemma's, has 33 MB.
_MOST_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer, which lie in `folder` or are `made` of a GGUF file.

    `tokenizer_json` is None for a checkpoint without one; such an artifact is prompted with token ids.
    """

    tokenizer_json: str | None
    folder: Path | None
    made: "GgufTokenizer | None" = None

    def write(self, target: Path) -> None:
        """Write the files into an artifact."""
        if self.made is not None:
            self.made.write(target)
            return
        if self.tokenizer_json is not None:
            (target / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        for name in _COPIED:
            if self.folder is not None and (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)


def read_tokenizer(folder: Path | None, vocabulary: int) -> TokenizerFiles:
    """Return a checkpoint's tokenizer. Raises `UnsupportedModelError` for one that cannot belong to the model."""
    if folder is None:
        return TokenizerFiles(None, None)
    if is_gguf(folder):
        made = gguf_tokenizer(opened_gguf(folder))
        if made.tokenizer_json is not None:
            _check(made.tokenizer_json, folder, vocabulary)
        return TokenizerFiles(made.tokenizer_json, None, made)
    _check_descriptions(folder)
    path = folder / "tokenizer.json"
    if path.is_file():
        text = read_text(path, _MOST_TOKENIZER_BYTES)
    elif any((folder / name).is_file() for name in _SLOW_SOURCES):
        text = _converted(folder)
    else:
        return TokenizerFiles(None, folder)
    _check(text, folder, vocabulary)
    return TokenizerFiles(text, folder)


def _check_descriptions(folder: Path) -> None:
    """Refuse files that are copied into the artifact, where they would keep it from loading."""
    for name in ("tokenizer.json", *_COPIED):
        path = folder / name
        if (path.exists() or path.is_symlink()) and not path.is_file():
            raise UnsupportedModelError(f"{path}: is no file, or a link to nowhere; the model would have no {name}")
        if name in _COPIED and name.endswith(".json") and path.is_file():
            read_json_object(path, _MOST_TOKENIZER_BYTES)
    generation_eos(folder)


def _converted(folder: Path) -> str:
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise UnsupportedModelError(
            f"{folder}: the tokenizer cannot be converted to tokenizer.json: {one_line(error)}"
        ) from error


def _check(text: str, folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise UnsupportedModelError(f"{folder / 'tokenizer.json'} is no tokenizer: {one_line(error)}") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocabulary:
        raise UnsupportedModelError(
            f"{folder}: the tokenizer has token ids up to {highest}, the model only {vocabulary} tokens: "
            "it belongs to another model"
        )


def generation_eos(folder: Path | None) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, which some chat models extend beyond config.json's."""
    if folder is None:
        return ()
    if is_gguf(folder):
        return gguf_tokenizer(opened_gguf(folder)).eos_token_ids
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    return token_ids(read_json_object(path), "eos_token_id", path)
