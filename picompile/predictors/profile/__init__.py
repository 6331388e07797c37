"""Profiling: counts of a model's firing neurons on text, and samples of its blocks' inputs, layer by layer."""
