"""The tokenizer of a GGUF file, made as a tokenizer.json from the lists in its metadata."""

from picompile.frontend.gguf.tokenizer.read import read_gguf_tokenizer

__all__ = ["read_gguf_tokenizer"]
