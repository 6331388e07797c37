"""The tokenizer of a GGUF file, as the files that a Hugging Face folder has for it.

A tokenizer.json is made of the file's lists, and held to them: its tokens have the file's ids and names.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.sampling import with_sampling
from picompile.frontend.gguf.tokenizer.byte_level import byte_level
from picompile.frontend.gguf.tokenizer.description import describe, end_tokens
from picompile.frontend.gguf.tokenizer.held import hold_to_list
from picompile.frontend.gguf.tokenizer.lists import PREFIX, read_vocabulary
from picompile.frontend.messages import shown
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile.frontend.vocabulary.assembly import MadeTokenizer
from picompile.frontend.vocabulary.sentencepiece import pieces_by_merges, pieces_by_score, unigram
from picompile.frontend.vocabulary.special import SpecialTokens, find_special
from picompile.frontend.vocabulary.vocabulary import Vocabulary

# Splits of byte-level files whose vocabulary is one of pieces: spaces are U+2581, and letters are no bytes.
_PIECES_BY_MERGES = ("gemma4", "sarvam-moe", "granite-embed-multi-311m")
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "t5": {"eos": 1, "unknown": 2, "padding": 0}}
_NOT_MADE = {
    "bert": "WordPiece of encoders, which write no text",
    "rwkv": "the longest match of bytes",
    "plamo2": "unigrams with a table of their own",
    "whitespace": "whole words",
    "hybriddna": "text beside runs of six bases",
}


def read_gguf_tokenizer(header: GgufHeader) -> TokenizerFiles:
    """Return the tokenizer in the metadata of `header`.

    A kind of vocabulary that the tokenizers package cannot express gives one without `tokenizer_json`, and with a
    reason. Raises `UnsupportedModelError`, in one line, for lists that contradict each other or cannot be read, and
    for texts that are split in a way that is not known.
    """
    try:
        return with_sampling(_read(header), header)
    except UsageError as error:
        raise UnsupportedModelError(str(error)) from error


def _read(header: GgufHeader) -> TokenizerFiles:
    vocabulary = read_vocabulary(header)
    if vocabulary is None:
        reason = f"{header.file}: holds no tokenizer ({PREFIX}model and tokens)"
        return TokenizerFiles(None, describe(header, None, {}, ()), reason=reason)
    ids = vocabulary.ids
    vocabulary = replace(vocabulary, ids=_with_default_ids(vocabulary))
    config = describe(header, vocabulary.model, vocabulary.ids, vocabulary.tokens)
    made = _made(vocabulary)
    if isinstance(made, str):
        special = find_special(vocabulary, vocabulary.merges or ())
        reason = (
            f"{header.file}: no tokenizer can be made of its vocabulary, which is {shown(vocabulary.model)}: {made}"
        )
        return TokenizerFiles(None, config, _ends(ids, special), reason)
    hold_to_list(vocabulary, made)
    return TokenizerFiles(made.text, config, _ends(ids, made.special), notes=made.notes)


def _ends(ids: Mapping[str, int], special: SpecialTokens) -> dict[str, Any]:
    """Return generation_config.json. Among tokens that are text, `</s>` is HTML's: Gemma has it beside `<s>`."""
    user_defined = {name: number for number, name in special.user_defined.items() if name != "</s>"}
    return end_tokens(ids, user_defined | {name: number for number, name in special.control.items()})


def _with_default_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the named ids, with llama.cpp's for names that the file lacks."""
    defaults = _DEFAULT_IDS.get(vocabulary.model, {})
    return {name: number for name, number in defaults.items() if number < len(vocabulary.tokens)} | {**vocabulary.ids}


def _made(vocabulary: Vocabulary) -> MadeTokenizer | str:
    """Return the tokenizer of a vocabulary, or why there is none."""
    if vocabulary.model == "gpt2":
        if vocabulary.pre in _PIECES_BY_MERGES:
            return pieces_by_merges(vocabulary, bos=vocabulary.flags.get("add_bos_token", False))
        return byte_level(vocabulary) if vocabulary.pre not in _NOT_MADE else _NOT_MADE[vocabulary.pre]
    if vocabulary.model == "llama":
        return pieces_by_score(vocabulary)
    if vocabulary.model == "gemma4":
        return pieces_by_merges(vocabulary, bos=False)
    if vocabulary.model == "t5":
        return unigram(vocabulary)
    return _NOT_MADE.get(vocabulary.model, "llama.cpp knows no such kind")
