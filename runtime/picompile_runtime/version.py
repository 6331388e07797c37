"""The version of picompile and picompile-runtime, which are released together. Both pyproject files read it here."""

__version__ = "0.1.0"
