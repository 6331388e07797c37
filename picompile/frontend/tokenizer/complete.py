"""The last steps of reading a tokenizer, the same for folders and GGUF files: what the model and its template add."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.end_tokens import with_end_tokens
from picompile.frontend.messages import printable, shown_text
from picompile.frontend.panics import CannotBuildError
from picompile.frontend.tokenizer.chat_bos import with_chat_bos
from picompile.frontend.tokenizer.check import check_ids, check_templates, rendered_probes
from picompile.frontend.tokenizer.fit import fitted
from picompile.frontend.tokenizer.turn_end import turn_end_tokens
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile_runtime.errors import ArtifactError, RequestError
from picompile_runtime.sampling.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """The tokenizer that an artifact's files were written from.

    Attributes:
        tokenizer: the tokenizer of the tokenizers package that was written, None where nothing else has read it.
        special: the special tokens by name that transformers hands to a chat template.
        is_gguf: whether it is a GGUF file's.
    """

    tokenizer: Any = None
    special: Mapping[str, str] | None = None
    is_gguf: bool = False


def completed(files: TokenizerFiles, model: Path, vocabulary: int, source: Source) -> TokenizerFiles:
    """Return a tokenizer that fits the model and names all tokens that end an answer, after checks of it.

    Args:
        files: the tokenizer as it was read.
        model: the checkpoint.
        vocabulary: the number of tokens that the model has rows for.
        source: what it is compared with.

    Raises:
        UnsupportedModelError: it cannot be read, cannot belong to the model, or differs from its source.
    """
    if files.tokenizer_json is None:
        return files
    try:
        return _completed(files, model, vocabulary, source)
    except (RequestError, CannotBuildError) as error:
        raise UnsupportedModelError(f"{model}: its tokenizer fails: {printable(str(error))}") from error


def _completed(files: TokenizerFiles, model: Path, vocabulary: int, source: Source) -> TokenizerFiles:
    tokenizer = _opened(files, model)
    if source.is_gguf and (changed := with_chat_bos(files, tokenizer, str(model))) is not files:
        files, tokenizer = changed, _opened(changed, model)
    ids = tokenizer.vocabulary()
    fit = fitted(files, ids, model, vocabulary)
    if fit is not files:
        names = tokenizer.added_tokens
        files, tokenizer, source = fit, _opened(fit, model), Source()
        _check_written(tokenizer, names.keys() - tokenizer.added_tokens.keys(), model)
    if any(number >= vocabulary for number in tokenizer.encode("a")):
        raise UnsupportedModelError(f"{model}: the tokenizer puts a token around texts that the model has no row for")
    notes = list(files.notes)
    if source.tokenizer is not None:
        notes += check_ids(tokenizer, source.tokenizer, str(model))
    special = files.tokenizer_config if source.special is None else source.special
    unusable = list(check_templates(tokenizer, _names(special), str(model)))
    notes += unusable
    named = ids.get(str(files.tokenizer_config.get("eos_token")))
    turn_end = () if unusable else turn_end_tokens(tokenizer)
    ends = (*files.eos_token_ids, *(() if named is None else (named,)), *turn_end)
    return replace(files, generation_config=with_end_tokens(files.generation_config, ends), notes=tuple(notes))


def _check_written(tokenizer: Tokenizer, dropped: Set[str], model: Path) -> None:
    """Refuse a template that writes a token for which the model has no row: every chat would be another prompt."""
    text = "".join(rendered_probes(tokenizer))
    if written := sorted(name for name in dropped if name in text):
        raise UnsupportedModelError(
            f"{model}: the chat template writes {shown_text(written[0])}, a token that the model has no row for: the "
            "tokenizer or the template belongs to another model"
        )


def _names(special: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in special.items() if name.endswith("_token") and isinstance(text, str)}


def _opened(files: TokenizerFiles, model: Path) -> Tokenizer:
    try:
        return Tokenizer(files.tokenizer_json or "", files.tokenizer_config)
    except ArtifactError as error:
        raise UnsupportedModelError(f"{model}: its tokenizer cannot be read: {printable(str(error))}") from error
