"""Packages that picompile needs for some of its work alone, and the command that installs them.

They are the extras of pyproject.toml, under the same names. An error names the packages and not the extra: picompile is
on no index, so `picompile[cuda]` means something only where pip is told where picompile is.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

EXTRAS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "cuda": (
            "cuda-bindings>=12.8,<13",
            "nvidia-cuda-nvrtc-cu12>=12.8,<12.9",
            "nvidia-cuda-runtime-cu12>=12.8,<12.9",
        ),
        "report": ("matplotlib>=3.9",),
        "testing": ("hypothesis>=6.115",),
    }
)


def install_command(*requirements: str) -> str:
    """Return the command that installs `requirements` into the environment of this process."""
    # pipx keeps this file in the environment of each application.
    is_pipx = (Path(sys.prefix) / "pipx_metadata.json").is_file()
    return shlex.join([*(("pipx", "inject", "picompile") if is_pipx else ("pip", "install")), *requirements])


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return install_command(*EXTRAS[extra])
