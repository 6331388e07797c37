"""The version of picompile, which artifacts, profiles and predictors record: that of its runtime."""

from picompile_runtime.version import __version__

__all__ = ["__version__"]
