"""The bytes of every token of a model, in llguidance's form."""

from __future__ import annotations

import re
from collections.abc import Collection

from picompile_runtime.sampling.tokenizer import Tokenizer
from picompile_server.text import TokenTexts

# llguidance's mark of tokens that have no text: no byte of UTF-8.
_SPECIAL = b"\xff"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def token_bytes(tokenizer: Tokenizer, vocab: int, end_tokens: Collection[int]) -> list[bytes]:
    """Return the bytes that each token adds to a text, by its id.

    No bytes means that a grammar never allows the token: the model has more columns of logits than its tokenizer has
    tokens, or another token has the same text. Of two such tokens, the one that is no byte token is kept, since it is
    the one that the model was trained on.

    Args:
        tokenizer: the model's tokenizer.
        vocab: how many columns the model's logits have; tokens beyond have none.
        end_tokens: tokens that end a text. They have none, whatever the tokenizer says.
    """
    special = {number: name for name, number in tokenizer.special_tokens.items() if number < vocab}
    names = {number: name for name, number in tokenizer.vocabulary().items() if number < vocab}
    texts = TokenTexts(tokenizer)
    found = [b""] * vocab
    for number in {*special, *(end for end in end_tokens if 0 <= end < vocab)}:
        found[number] = _SPECIAL + special.get(number, names.get(number, f"<end {number}>")).encode()
    usual = sorted(
        names.keys() - special.keys(), key=lambda number: (bool(_BYTE_TOKEN.fullmatch(names[number])), number)
    )
    taken: set[bytes] = set()
    for number in usual:
        text = texts.bytes_of(number)
        if not found[number] and text not in taken:
            taken.add(text)
            found[number] = text
    return found
