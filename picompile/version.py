"""The version of picompile, which artifacts, profiles and predictors record."""

__version__ = "0.1.0"
