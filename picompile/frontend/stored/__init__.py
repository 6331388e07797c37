"""Checkpoints that others have quantized: one file for each method, and `StoredMatrices`, which reads one matrix of
them at a time, as float32 or, where that is exact, as rows of ours.

A file of this folder that has a `Method` adds one: what `quant_method` of a quantization config calls it, which
variants are read, and where its matrices are in a checkpoint. Everything is known from the tensors where it can be:
labels are wrong at times.
"""

from picompile.frontend.stored.matrices import StoredMatrices, find_method

__all__ = ["StoredMatrices", "find_method"]
