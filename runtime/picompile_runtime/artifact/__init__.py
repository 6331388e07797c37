"""Reading an artifact: its files, its program and its weights, each checked before use."""
