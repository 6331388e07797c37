"""Lowering of the final graph to kernels, packed weights and a flat program."""
