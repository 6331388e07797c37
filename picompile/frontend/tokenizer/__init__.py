"""The tokenizer of a checkpoint, read from a Hugging Face folder or a GGUF file as `TokenizerFiles`."""
