"""Byte-level BPE, `gpt2` in GGUF files: bytes are letters, and a published expression splits a text into pieces."""

from collections.abc import Sequence

from picompile.errors import UnsupportedModelError
from picompile.frontend.byte_letters import as_letters, letter_bytes
from picompile.frontend.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS, pre_of_architecture
from picompile.frontend.messages import shown
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
from picompile.frontend.vocabulary.vocabulary import NORMAL, Vocabulary

# Its merges follow from the order of its tokens, as with tiktoken's vocabularies: llama.cpp reads files without them.
_MERGES_BY_RANK = "kimi-k2"


def byte_level(vocabulary: Vocabulary) -> MadeTokenizer:
    """Return the tokenizer.json of a byte-level vocabulary.

    Raises `UnsupportedModelError` for a split that is not known, and for merges that are missing or contradict the
    vocabulary.
    """
    name, notes = _split(vocabulary)
    split = PRE_TOKENIZERS[name]
    merges = _merges(vocabulary, name)
    special = find_special(vocabulary, merges)
    ids = kept_ids(vocabulary, merges)
    add_bos = vocabulary.flags.get("add_bos_token", split.add_bos)
    text = tokenizer_json(
        vocabulary,
        special,
        bpe(vocabulary, ids, merges, ignore_merges=split.ignore_merges),
        (add_bos, vocabulary.flags.get("add_eos_token", False)),
        normalizer=None if split.normalizer is None else {"type": split.normalizer},
        pre_tokenizer=split.to_json(),
        decoder=_decoder(special),
    )
    return MadeTokenizer(text, ids, special, byte_level=True, notes=notes)


def _split(vocabulary: Vocabulary) -> tuple[str, tuple[str, ...]]:
    """Return the name of the vocabulary's split, and a line where it is a guess."""
    if vocabulary.pre:
        if vocabulary.pre in PRE_TOKENIZERS:
            return vocabulary.pre, ()
        raise UnsupportedModelError(
            f"{vocabulary.file}: splits texts by {shown(vocabulary.pre)} (tokenizer.ggml.pre), which is not known: "
            "its tokens would be wrong; convert the model again, or use a Hugging Face folder of it"
        )
    name = pre_of_architecture(vocabulary.architecture)
    if name is not None:
        return name, ()
    note = (
        f"{vocabulary.file}: does not say how texts are split (tokenizer.ggml.pre); llama.cpp's default is taken, "
        "which may be another than the model's; convert the model again"
    )
    return "default", (note,)


def _merges(vocabulary: Vocabulary, name: str) -> Sequence[tuple[str, str]]:
    if vocabulary.merges is not None:
        return vocabulary.merges
    if name != _MERGES_BY_RANK:
        raise UnsupportedModelError(f"{vocabulary.file}: lists no merges (tokenizer.ggml.merges)")
    normal = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == NORMAL]
    return merges_by_rank(vocabulary.file, {token: -float(rank) for rank, token in enumerate(normal)})


def _decoder(special: SpecialTokens) -> Part:
    """Return the decoder, which takes letters as bytes, except in special tokens: their names are texts."""
    plain = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    letters = letter_bytes().keys()
    like_bytes = [name for name in special.names.values() if not name.isascii() and letters >= set(name)]
    found = sequence("decoders", [*(whole_token(name, as_letters(name)) for name in sorted(like_bytes)), plain])
    return found or plain
