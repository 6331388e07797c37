"""The tokenizer of a checkpoint, as the runtime wants it: `tokenizer.json` and what belongs to it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from picompile.errors import UnsupportedModelError

_COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Without tokenizer.json, transformers can still build a fast tokenizer from one of these.
_SLOW_SOURCES = ("tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class TokenizerFiles:
    """`tokenizer_json` is None for a checkpoint without a tokenizer; such an artifact is prompted with token ids."""

    tokenizer_json: str | None
    folder: Path | None

    def write(self, target: Path) -> None:
        """Writes the files into an artifact."""
        if self.tokenizer_json is not None:
            (target / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        for name in _COPIED:
            if self.folder is not None and (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)


def read_tokenizer(folder: Path | None, vocabulary: int) -> TokenizerFiles:
    """Reads a checkpoint's tokenizer. Raises `UnsupportedModelError` for one that cannot belong to the model."""
    if folder is None:
        return TokenizerFiles(None, None)
    path = folder / "tokenizer.json"
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    elif any((folder / name).is_file() for name in _SLOW_SOURCES):
        text = _converted(folder)
    else:
        return TokenizerFiles(None, folder)
    _check(text, folder, vocabulary)
    return TokenizerFiles(text, folder)


def _converted(folder: Path) -> str:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise UnsupportedModelError(
            f"{folder}: the tokenizer cannot be converted to tokenizer.json: {error}"
        ) from error


def _check(text: str, folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise UnsupportedModelError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocabulary:
        raise UnsupportedModelError(
            f"{folder}: the tokenizer has token ids up to {highest}, the model only {vocabulary} tokens: "
            "it belongs to another model"
        )


def generation_eos(folder: Path | None) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, which some chat models extend beyond config.json's."""
    path = folder / "generation_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return ()
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from error
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)
