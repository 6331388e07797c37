"""Reading an artifact: its files, its program and its weights, each checked before use."""

# Sequences that the KV cache of one artifact holds at most.
MOST_SEQUENCES = 256
