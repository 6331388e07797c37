"""The tokenizer of a folder without a tokenizer.json: a model of sentencepiece, or what transformers' class reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.panics import CannotBuildError
from picompile.frontend.tokenizer import library
from picompile.frontend.tokenizer.built import Built, known_special
from picompile.frontend.tokenizer.sentencepiece_model import UNIGRAM, SentencePieceModel, read_sentencepiece
from picompile.frontend.vocabulary.sentencepiece import pieces_by_score, unigram
from picompile.frontend.vocabulary.vocabulary import Vocabulary

_PIECES = "tokenizer.model"
# Files that hold a vocabulary.
SOURCES = (_PIECES, "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def build_without_json(folder: Path, config: Mapping[str, Any]) -> Built:
    """Return the tokenizer of a folder's other sources.

    A tokenizer.model is read here: transformers' classes leave out how sentencepiece prepares a text, and need packages
    for it that nothing else needs.

    Args:
        folder: the checkpoint's.
        config: the contents of its tokenizer_config.json.

    Raises `UnsupportedModelError` where no tokenizer can be made of them.
    """
    file = folder / _PIECES
    model = read_sentencepiece(file) if file.is_file() else None
    if model is not None:
        return _of_pieces(folder, config, model)
    try:
        tokenizer = library.chosen_class(folder)
    except CannotBuildError as error:
        why = f"{_PIECES} is no model of sentencepiece" if file.is_file() else str(error)
        raise UnsupportedModelError(
            f"{folder}: has no tokenizer.json, and none can be made of its other files: {why}; add the model's own, "
            "which AutoTokenizer's save_pretrained writes"
        ) from error
    if not library.has_backend(tokenizer):
        raise UnsupportedModelError(
            f"{folder}: has no tokenizer.json, and {type(tokenizer).__name__} of transformers cannot write one; "
            "save it as a fast tokenizer"
        )
    return built_of_class(tokenizer)


def built_of_class(tokenizer: Any) -> Built:
    """Return what a class of transformers built of a folder, one with a tokenizer of the tokenizers package."""
    backend = library.plain_backend(tokenizer)
    return Built(backend, str(backend.to_str()), known_special(tokenizer.special_tokens_map, backend))


def _of_pieces(folder: Path, config: Mapping[str, Any], model: SentencePieceModel) -> Built:
    """Return the tokenizer of a model of sentencepiece, with what the folder's other files add to it."""
    made = (unigram if model.kind == UNIGRAM else pieces_by_score)(_vocabulary(folder / _PIECES, config, model))
    try:
        with library.copied(folder, {"tokenizer.json": made.text}) as copy:
            tokenizer = library.of_file(copy)
        backend = library.plain_backend(tokenizer)
        with library.guarded():
            backend = library.finding_whole(backend)
    except CannotBuildError as error:
        raise UnsupportedModelError(f"{folder}: no tokenizer can be made of its files: {error}") from error
    own = {f"{name}_token": model.pieces[number] for name, number in model.ids.items()}
    special = known_special({**own, **tokenizer.special_tokens_map}, backend)
    library.add_special(backend, special.values())
    return Built(backend, str(backend.to_str()), special, made.notes)


def _vocabulary(file: Path, config: Mapping[str, Any], model: SentencePieceModel) -> Vocabulary:
    """Return the pieces as a GGUF file has them, which is made of such a model.

    As with llama.cpp, texts of merged pieces begin with the bos token unless tokenizer_config.json says otherwise. As
    with transformers, `legacy` there puts a space before the text behind each special token unless it is false.
    """
    flags = {"add_bos_token": True, "add_eos_token": False}
    flags |= {"add_space_prefix": model.add_dummy_prefix, "remove_extra_whitespaces": model.remove_extra_whitespaces}
    names = {name: name for name in ("add_bos_token", "add_eos_token")} | {"add_prefix_space": "add_space_prefix"}
    flags |= {flag: config[name] for name, flag in names.items() if isinstance(config.get(name), bool)}
    return Vocabulary(
        file=file,
        model="t5" if model.kind == UNIGRAM else "llama",
        pre=None,
        architecture="",
        name="",
        tokens=model.pieces,
        types=model.types,
        scores=model.scores,
        merges=None,
        ids={_GGUF_NAMES[name]: number for name, number in model.ids.items()},
        flags=flags,
        charsmap=model.charsmap,
        prefix_once=config.get("legacy") is False,
    )
