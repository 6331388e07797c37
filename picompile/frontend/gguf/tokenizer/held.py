"""The list of a GGUF file that its tokenizer is held to."""

import re

from picompile.errors import UnsupportedModelError
from picompile.frontend.byte_letters import letter_bytes
from picompile.frontend.messages import shown
from picompile.frontend.panics import CannotBuildError, guarded
from picompile.frontend.tokenizer_check import ListedTokens, first_disagreement
from picompile.frontend.vocabulary.assembly import MadeTokenizer
from picompile.frontend.vocabulary.vocabulary import Vocabulary

# A damaged table of a normalizer fails on some of them.
_LETTERS = "".join(map(chr, range(0x20, 0x3400)))
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def hold_to_list(vocabulary: Vocabulary, made: MadeTokenizer) -> None:
    """Raise `UnsupportedModelError`, in one line, where a tokenizer that was made is none, or not the file's."""
    from tokenizers import Tokenizer

    try:
        with guarded():
            tokenizer = Tokenizer.from_str(made.text)
            found = first_disagreement(tokenizer, _listed(vocabulary, made))
            tokenizer.encode(_LETTERS if vocabulary.charsmap else "a")
    except CannotBuildError as error:
        what = f"{vocabulary.file}: no tokenizer can be made of its vocabulary, which is {shown(vocabulary.model)}"
        raise UnsupportedModelError(f"{what}: {error}") from error
    if found is not None:
        raise UnsupportedModelError(f"{vocabulary.file}: no tokenizer.json can be made of its vocabulary: {found}")


def _listed(vocabulary: Vocabulary, made: MadeTokenizer) -> ListedTokens:
    # Under the file's own names, where the tokenizer spells some in another way.
    special = {number: vocabulary.tokens[number] for number in made.special.names}
    texts = {
        number: _letters_text(name) if made.byte_level else _piece_text(name)
        for name, number in made.ids.items()
        if number not in special
    }
    return ListedTokens(
        ids=made.ids,
        special=special,
        control=frozenset(made.special.control),
        texts=texts,
        strips_space=made.strips_space,
    )


def _letters_text(name: str) -> bytes:
    """Return the bytes that letters stand for; a name with others is a text as it is."""
    table = letter_bytes()
    found = [table.get(letter) for letter in name]
    return name.encode() if None in found else bytes(byte for byte in found if byte is not None)


def _piece_text(name: str) -> bytes:
    byte = _BYTE.fullmatch(name)
    return name.replace("\u2581", " ").encode() if byte is None else bytes([int(byte[1], 16)])
