"""The runtime under the compiler's name: `from picompile.runtime import load`. See `picompile_runtime`."""

from picompile_runtime import *  # noqa: F403
