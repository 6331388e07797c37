"""GGUF files read as models: the contents of a config.json, tensors under their Hugging Face names, and a tokenizer.

A file is taken to be hostile. `header.py` checks every count, length and offset before anything else looks at it;
records of architectures (`architectures.py`), transformers' tables for others, and the `gguf` package's dequantization
then work on what was checked, and never on the file.
"""
