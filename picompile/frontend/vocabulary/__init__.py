"""Vocabularies, from GGUF files and models of sentencepiece, written as a tokenizer.json."""
