"""Vocabularies of sentencepiece: `llama` (BPE by scores), `gemma4` (BPE by merges) and `t5` (unigram)."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from picompile.frontend.vocabulary.assembly import (
    MadeTokenizer,
    Part,
    bpe,
    kept_ids,
    sequence,
    tokenizer_json,
    whole_token,
)
from picompile.frontend.vocabulary.merges import merges_by_rank
from picompile.frontend.vocabulary.special import SpecialTokens, find_special
from picompile.frontend.vocabulary.ties import note_of_ties
from picompile.frontend.vocabulary.vocabulary import NORMAL, UNUSED, USER_DEFINED, Vocabulary

# The letter that stands for a space (U+2581), and one that no text has, for the time that a space is written.
_SPACE, _NO_LETTER = "\u2581", "\ufdd0"


def pieces_by_score(vocabulary: Vocabulary) -> MadeTokenizer:
    """Return the tokenizer.json of a `llama` vocabulary.

    The space before a text is one before each text between special tokens, as llama.cpp and most published files
    have it, unless `prefix_once`. Raises `UnsupportedModelError` where no merges can be found.
    """
    prefix = vocabulary.flags.get("add_space_prefix", True)
    around = (vocabulary.flags.get("add_bos_token", True), vocabulary.flags.get("add_eos_token", False))
    if not prefix:
        vocabulary = _with_rows_of_spaces(vocabulary)
    if vocabulary.merges is not None:
        return _bpe_of_pieces(vocabulary, vocabulary.merges, prefix=prefix, around=around)
    scores = _scores(vocabulary)
    merges = merges_by_rank(vocabulary.file, _distinct(scores))
    made = _bpe_of_pieces(vocabulary, merges, prefix=prefix, around=around)
    return replace(made, notes=note_of_ties(vocabulary.file, scores, merges))


def pieces_by_merges(vocabulary: Vocabulary, bos: bool) -> MadeTokenizer:
    """Return the tokenizer.json of a vocabulary of pieces with merges; a text begins with the bos token if `bos`."""
    prefix = vocabulary.flags.get("add_space_prefix", False)
    around = (bos, vocabulary.flags.get("add_eos_token", False))
    return _bpe_of_pieces(vocabulary, vocabulary.merges or [], prefix=prefix, around=around)


def unigram(vocabulary: Vocabulary) -> MadeTokenizer:
    """Return the tokenizer.json of a unigram vocabulary, whose scores are the logarithms of probabilities."""
    prefix = vocabulary.flags.get("add_space_prefix", False)
    around = (vocabulary.flags.get("add_bos_token", False), vocabulary.flags.get("add_eos_token", True))
    special = find_special(vocabulary, ())
    scores = vocabulary.scores or [0.0] * len(vocabulary.tokens)
    kinds = list(zip(scores, vocabulary.types, strict=True))
    least = min((score for score, kind in kinds if kind == NORMAL), default=0.0)
    # Special tokens are found before; a low score of theirs would lower that of unknown letters.
    listed = [score if kind == NORMAL else 0.0 if kind == USER_DEFINED else least for score, kind in kinds]
    model = {
        "type": "Unigram",
        "unk_id": vocabulary.ids.get("unknown"),
        "vocab": [list(pair) for pair in zip(vocabulary.tokens, listed, strict=True)],
        "byte_fallback": _has_bytes(vocabulary),
    }
    ids = {name: number for number, name in enumerate(vocabulary.tokens)}
    return _made(vocabulary, ids, special, model, prefix, around)


def _bpe_of_pieces(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], prefix: bool, around: tuple[bool, bool]
) -> MadeTokenizer:
    special = find_special(vocabulary, merges)
    unknown = vocabulary.ids.get("unknown")
    ids = kept_ids(vocabulary, merges)
    model = bpe(
        vocabulary,
        ids,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=_has_bytes(vocabulary),
    )
    return _made(vocabulary, ids, special, model, prefix, around)


def _made(
    vocabulary: Vocabulary,
    ids: Mapping[str, int],
    special: SpecialTokens,
    model: Part,
    prefix: bool,
    around: tuple[bool, bool],
) -> MadeTokenizer:
    once, extra = prefix and vocabulary.prefix_once, vocabulary.flags.get("remove_extra_whitespaces", False)
    text = tokenizer_json(
        vocabulary,
        special,
        model,
        around,
        normalizer=_normalizer(vocabulary, prefix, extra, once),
        pre_tokenizer=_prefix_once(extra) if once else None,
        decoder=_decoder(special, prefix),
    )
    return MadeTokenizer(text, ids, special, strips_space=prefix)


def _with_rows_of_spaces(vocabulary: Vocabulary) -> Vocabulary:
    """Return the vocabulary with its user-defined rows of spaces as sentencepiece has them, of U+2581.

    Converters write Gemma's with spaces. There they are pieces that merge before all others, and a text may have them
    with either letter.
    """
    names = [
        name.replace(" ", _SPACE) if kind == USER_DEFINED and name and not name.strip(" ") else name
        for name, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    return replace(vocabulary, tokens=names)


def _scores(vocabulary: Vocabulary) -> dict[str, float]:
    """Return the scores of the pieces that are joined."""
    listed = vocabulary.scores or [0.0] * len(vocabulary.tokens)
    pieces = list(zip(vocabulary.tokens, listed, vocabulary.types, strict=True))
    rows = [token for token, _, kind in pieces if kind == USER_DEFINED and not token.strip(_SPACE)]
    scores = {token: score for token, score, kind in pieces if kind == NORMAL}
    return {token: inf for token in rows if token} | scores


def _distinct(scores: Mapping[str, float]) -> Mapping[str, float]:
    """Return the scores, or, where all are equal, the order of tokens as theirs, as converters leave it."""
    if len({score for score in scores.values() if score != inf}) > 1:
        return scores
    return {token: score if score == inf else -float(rank) for rank, (token, score) in enumerate(scores.items())}


def _has_bytes(vocabulary: Vocabulary) -> bool:
    """Return whether bytes are tokens, with which letters are written that are no pieces. Gemma 2 lacks tab's."""
    names = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind != UNUSED}
    return any(f"<0x{byte:02X}>" in names for byte in range(256))


def _normalizer(vocabulary: Vocabulary, prefix: bool, extra: bool, once: bool) -> Part | None:
    parts: list[Part] = []
    if vocabulary.charsmap:
        text = base64.b64encode(vocabulary.charsmap).decode()
        parts.append({"type": "Precompiled", "precompiled_charsmap": text})
    if extra:
        ends = r" +\z" if once else r"\A +| +\z"
        parts.append({"type": "Replace", "pattern": {"Regex": ends}, "content": ""})
        parts.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix and not once:
        parts.append({"type": "Prepend", "prepend": _SPACE})
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return sequence("normalizers", parts)


def _prefix_once(extra: bool) -> Part:
    """Return the pre-tokenizer that puts a space before the beginning of a text.

    `Metaspace` puts none before a text that begins with its letter for a space, but sentencepiece does. So the first
    one has another letter than the normalizer writes, and the second one replaces it. If `extra`, spaces at the
    beginning are dropped: the one that is left of them is the space before the text.
    """
    kinds = [(_SPACE, "first")] if extra else [(" ", "first"), (_SPACE, "never")]
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Metaspace", "replacement": letter, "prepend_scheme": scheme, "split": False}
            for letter, scheme in kinds
        ],
    }


def _decoder(special: SpecialTokens, prefix: bool) -> Part | None:
    """Return the decoder, which writes spaces and bytes, and the names of special tokens as they are."""
    spelled = sorted(name for name in special.names.values() if _SPACE in name and name.strip(_SPACE))
    parts: list[Part] = [whole_token(name, name.replace(_SPACE, _NO_LETTER)) for name in spelled]
    parts.append({"type": "Replace", "pattern": {"String": _SPACE}, "content": " "})
    parts += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if spelled:
        parts.append({"type": "Replace", "pattern": {"String": _NO_LETTER}, "content": _SPACE})
    if prefix:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return sequence("decoders", parts)
