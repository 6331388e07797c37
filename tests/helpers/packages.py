"""The three packages of the repository, built with the hatchling that is installed here."""

import subprocess
import sys
from pathlib import Path

from helpers.support import ROOT

# Where each package is, by its name.
PROJECTS = {"picompile": ROOT, "picompile-runtime": ROOT / "runtime", "picompile-server": ROOT / "server"}


def build(project: Path, folder: Path, kind: str = "wheel") -> Path:
    """Build the `wheel` or `sdist` of the package in the folder `project`, into `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    before = {*folder.glob("*")}
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (built,) = {*folder.glob("*")} - before
    return built
