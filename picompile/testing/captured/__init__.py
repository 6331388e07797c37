"""Whole decoders in the form that capture gives, each in a style of its own, for tests of the raising passes."""
