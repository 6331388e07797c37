"""GGUF files read as models: the contents of a config.json, tensors under their Hugging Face names, and a tokenizer.

A file is taken to be hostile. `header.py` checks every count, length and offset before anything else looks at it;
transformers' own tables and conversions, and the `gguf` package's dequantization, then work on what was checked, and
never on the file.
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.frontend.gguf.header import GgufHeader, read_header
    from picompile.frontend.gguf.model import GgufModel, GgufTensor, open_gguf
    from picompile.frontend.gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer
    from picompile.frontend.gguf.weights import GgufWeights

__all__ = [
    "GgufHeader",
    "GgufModel",
    "GgufTensor",
    "GgufTokenizer",
    "GgufWeights",
    "open_gguf",
    "read_gguf_tokenizer",
    "read_header",
]

# Resolved on first use: a header is read without torch and transformers.
_HOME = {
    "GgufHeader": ".header",
    "GgufModel": ".model",
    "GgufTensor": ".model",
    "GgufTokenizer": ".tokenizer",
    "GgufWeights": ".weights",
    "open_gguf": ".model",
    "read_gguf_tokenizer": ".tokenizer",
    "read_header": ".header",
}

__getattr__ = lazy(__name__, _HOME)
