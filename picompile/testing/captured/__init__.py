"""Whole decoders as capture gives them, each written in a style of its own, for tests of the raising passes."""
