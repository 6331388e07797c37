"""Profiling: how a model's neurons fire on text, and samples of what its feed-forward blocks read, layer by layer."""
