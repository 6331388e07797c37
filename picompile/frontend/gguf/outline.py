"""The outline of a GGUF file: all of it that may decide about more than the vocabulary and the numbers of weights.

That is the header, but for prose and lists of tokens, and the few numbers among the tensors' that a config is made of.
Two files with the same outline are models of the same architecture, sizes, types of tensors and named tokens.
"""

import hashlib
import json

from picompile.frontend.gguf.cursor import Cursor
from picompile.frontend.gguf.header import GgufHeader, at_file
from picompile.frontend.gguf.metadata import read_array, read_text
from picompile.frontend.gguf.rope import FREQUENCIES, LONG_FACTORS
from picompile.frontend.gguf.ties import is_tied

# Texts of the model's kind; all others that begin with `general.`, and lists of them, are for people.
_KINDS = ("general.architecture", "general.type")
_PROSE = ("general.", "tokenizer.chat_template")
_TOKENS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges")

CONFIG_TENSORS = (FREQUENCIES, *LONG_FACTORS)
"""Tensors that are no weights: a config is made of their numbers."""
# Ten times as many as there are in any model.
_MOST_BYTES = 64 << 10


def outline_of(header: GgufHeader) -> str:
    """Return a text that is the same for headers with the same outline. Raises as `read_text` does."""
    texts = {key: read_text(header, key) for key in header.texts if key in _KINDS or not key.startswith(_PROSE)}
    arrays = {
        key: [place.kind, place.count, None if key in _TOKENS else read_array(header, key)]
        for key, place in header.arrays.items()
        if not key.startswith(_PROSE)
    }
    # In their order: names of tensors may decide by the order in which they are found.
    tensors = [[entry.name, entry.type, entry.shape] for entry in header.tensors.values()]
    numbers = {name: _data(header, name).hex() for name in CONFIG_TENSORS if name in header.tensors}
    tied = is_tied(header, texts.get("general.architecture") or "")
    return json.dumps([header.magic.decode("latin-1"), header.values, texts, arrays, tensors, numbers, tied])


def _data(header: GgufHeader, name: str) -> bytes:
    """Return the bytes of a small tensor; of a large one, which no config is made of, the first ones."""
    entry = header.tensors[name]

    def read(cursor: Cursor) -> bytes:
        cursor.skip(entry.offset, name)
        return cursor.take(min(entry.size_bytes, _MOST_BYTES), name)

    return at_file(entry.file, read)


def metadata_digest(header: GgufHeader) -> str:
    """Return a hash of all bytes before the first tensor of the file, or of the first file of several."""
    own = [entry.offset for entry in header.tensors.values() if entry.file == header.file]
    with header.file.open("rb") as file:
        return hashlib.sha256(file.read(min(own, default=-1))).hexdigest()
