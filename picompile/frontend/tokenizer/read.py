"""Reading of a checkpoint's tokenizer: of a Hugging Face folder, or of a GGUF file."""

from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.config import one_line, quiet_transformers
from picompile.frontend.end_tokens import with_end_tokens
from picompile.frontend.json_file import read_json_object, read_text, token_ids
from picompile.frontend.model_file import gguf_tokenizer, is_gguf, opened_gguf
from picompile.frontend.tokenizer_files import TokenizerFiles

_DESCRIPTIONS = ("tokenizer_config.json", "generation_config.json")
_TEMPLATE = "chat_template.jinja"
# Without tokenizer.json, transformers can still build a fast tokenizer from one of these.
_SLOW_SOURCES = ("tokenizer.model", "vocab.json", "spiece.model")

# The largest that is known, Gemma's, has 33 MB.
_MOST_TOKENIZER_BYTES = 256 << 20


def read_tokenizer(model: Path | None, vocabulary: int) -> TokenizerFiles:
    """Return a checkpoint's tokenizer. Raises `UnsupportedModelError` for one that cannot belong to the model."""
    if model is None:
        return TokenizerFiles()
    files = gguf_tokenizer(opened_gguf(model)) if is_gguf(model) else _read_folder(model)
    if files.tokenizer_json is not None:
        _check(files.tokenizer_json, model, vocabulary)
    return files


def _read_folder(folder: Path) -> TokenizerFiles:
    _check_descriptions(folder)
    config, generation = (_read_description(folder / name) for name in _DESCRIPTIONS)
    ends = token_ids(generation, "eos_token_id", folder / "generation_config.json")
    if (folder / _TEMPLATE).is_file():
        config = {**config, "chat_template": read_text(folder / _TEMPLATE, _MOST_TOKENIZER_BYTES)}
    path, text = folder / "tokenizer.json", None
    if path.is_file():
        text = read_text(path, _MOST_TOKENIZER_BYTES)
    elif any((folder / name).is_file() for name in _SLOW_SOURCES):
        text = _converted(folder)
    return TokenizerFiles(text, config, with_end_tokens(generation, ends))


def _read_description(file: Path) -> dict[str, Any]:
    return read_json_object(file, _MOST_TOKENIZER_BYTES) if file.is_file() else {}


def _check_descriptions(folder: Path) -> None:
    """Refuse links to nowhere, and folders in a file's place: nobody would hear that the file was not read."""
    for name in ("tokenizer.json", *_DESCRIPTIONS, _TEMPLATE):
        path = folder / name
        if (path.exists() or path.is_symlink()) and not path.is_file():
            raise UnsupportedModelError(f"{path}: is no file, or a link to nowhere; the model would have no {name}")


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
