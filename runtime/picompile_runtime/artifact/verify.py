"""Checks a whole artifact: every byte of its files, and its kernels against its program."""

from __future__ import annotations

import os

from picompile_runtime.artifact.call_order import check_code
from picompile_runtime.artifact.files import Progress, translate_system_errors
from picompile_runtime.artifact.manifest import Manifest
from picompile_runtime.artifact.reader import open_hashed
from picompile_runtime.devices.open_accelerator import accelerator_kind


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Manifest:
    """Check every byte of the artifact in the folder `path`, and return its manifest.

    All files are hashed. Code that runs on this machine is loaded, and its kernels are checked against the program.

    Args:
        path: the artifact's folder.
        progress: called with a file's name, how many of its bytes are checked, and its size in bytes.

    Raises:
        ArtifactError: the artifact is not whole or not valid.
        DoesNotFitError: this process has too little memory, or may not open more files.
        RequestError: `path` cannot be a path.
    """
    artifact = open_hashed(path, progress)
    with translate_system_errors(artifact.folder):
        try:
            if artifact.manifest.accelerator is not None:
                accelerator_kind(artifact).verify(artifact)
            for variant in artifact.manifest.code:
                if variant.runs_here:
                    check_code(artifact, artifact.load_code(variant))
        finally:
            artifact.close()
    return artifact.manifest
