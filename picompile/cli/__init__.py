"""The command line: one command a file, every one a thin layer over the package's API.

Commands import what they need when they run: `picompile run` must not pay for torch, nor `--help` for anything.
"""

from picompile.cli.app import app, main

__all__ = ["app", "main"]
