"""What of a GGUF file's header may decide about anything but the vocabulary: all but names, prose and lists of tokens.

Two files with the same outline are models of the same architecture, sizes, types of tensors and named tokens.
"""

import hashlib
import json

from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import read_array, read_text

# Texts of the model's kind; all others that begin with `general.` are for people.
_KINDS = ("general.architecture", "general.type")
_PROSE = ("general.", "tokenizer.chat_template")
_TOKENS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges")


def outline_of(header: GgufHeader) -> str:
    """Return a text that is the same for headers with the same outline. Raises as `read_text` does."""
    texts = {
        key: None if key.startswith(_PROSE) and key not in _KINDS else read_text(header, key) for key in header.texts
    }
    arrays = {
        key: [place.kind, place.count, None if key in _TOKENS else read_array(header, key)]
        for key, place in header.arrays.items()
    }
    # In their order: names of tensors may decide by the order in which they are found.
    tensors = [[entry.name, entry.type, entry.shape] for entry in header.tensors.values()]
    return json.dumps([header.magic.decode("latin-1"), header.values, texts, arrays, tensors])


def metadata_digest(header: GgufHeader) -> str:
    """Return a hash of all bytes before the first tensor of the file, or of the first file of several."""
    own = [entry.offset for entry in header.tensors.values() if entry.file == header.file]
    with header.file.open("rb") as file:
        return hashlib.sha256(file.read(min(own))).hexdigest()
