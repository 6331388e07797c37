"""A stand-in for the CUDA driver."""
