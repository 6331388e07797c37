"""Runs kernels and lowered programs on arrays, on the CPU and in an emulation of GPUs."""
