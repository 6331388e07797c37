"""Placement: which parts of a model lie on the GPU, and which on the host; see `make_plan`."""
