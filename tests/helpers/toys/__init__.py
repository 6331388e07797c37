"""Artifacts of a toy model whose kernels are plain C, for tests of the runtime without the compiler."""
