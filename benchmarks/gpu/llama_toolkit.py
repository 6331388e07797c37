"""Gets from PyPI what a build of llama.cpp with CUDA needs: its sources, CUDA's compiler and cuBLAS."""

import subprocess
import sys
from pathlib import Path

# llama.cpp is vendored in it.
SOURCES = "llama-cpp-python==0.3.36"
# CUDA 13.0, the oldest of the drivers that the build is for.
PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cublas==13.1.2.11",
)
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


class PackageError(Exception):
    """Something that PyPI does not give."""


def sources(folder: Path) -> Path:
    """Return the source distribution of llama-cpp-python, which is brought to `folder` unless it is there."""
    name = SOURCES.replace("-", "_").replace("==", "-") + ".tar.gz"
    if not (folder / name).exists():
        _run("download", "--no-deps", "--no-binary", SOURCES.partition("==")[0], "--dest", str(folder), SOURCES)
    return folder / name


def toolkit(folder: Path) -> Path:
    """Return the root of a toolkit with cuBLAS, which is installed to `folder` unless it is there."""
    root = folder / "nvidia" / "cu13"
    if not (root / "lib64").exists():
        _run("install", "--no-deps", "--upgrade", "--target", str(folder), *PACKAGES)
        # Names that linkers and CMake look for.
        (root / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
        (root / "lib64").symlink_to("lib")
    return root


def _run(*arguments: str) -> None:
    done = subprocess.run([*_PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or [done.stdout.strip()]
        raise PackageError(f"pip {arguments[0]} failed: {lines[-1]}")
