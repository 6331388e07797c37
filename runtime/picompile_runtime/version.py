"""The version of picompile, picompile-runtime and picompile-server, released together. All pyproject files read it."""

__version__ = "0.1.0"
