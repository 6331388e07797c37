"""A program against the code that it calls, before any of it runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from picompile_runtime.artifact import PROGRAM, Artifact
from picompile_runtime.call_checks import check_calls
from picompile_runtime.call_order import check_order
from picompile_runtime.errors import ArtifactError
from picompile_runtime.interfaces import Interface
from picompile_runtime.native import HostLibrary
from picompile_runtime.program import Argument


def check_code(artifact: Artifact, library: HostLibrary) -> None:
    """Check every call of an artifact's program against the kernels of `library` and of the hot device's code.

    A library without a table of its kernels was not made by `picompile compile`, and is taken as it is. Raises
    ArtifactError for a call that a kernel was not made for.
    """
    of_host = library.interfaces()
    if of_host is None:
        return
    kernels = {"host": of_host, "device": _device_interfaces(artifact) if artifact.program.has_device else {}}
    where = str(artifact.folder / PROGRAM)

    def numbers(argument: Argument) -> tuple[int, int]:
        view = argument.view
        offset = artifact.tensors[argument.name].offset + view.offset
        count = view.size_bytes // np.dtype(view.dtype).itemsize
        found = np.frombuffer(artifact.weights, view.dtype, count, offset)
        return int(found.min()), int(found.max())

    for device, table in kernels.items():
        check_calls(artifact.program, device, table, numbers, where)
    check_order(artifact.program, kernels, where)


def _device_interfaces(artifact: Artifact) -> Mapping[str, Interface]:
    code = artifact.manifest.hot_device
    if code is not None and code.kind == "cuda":
        from picompile_runtime.cuda.open import read_device_images

        found: Mapping[str, Interface] | None = read_device_images(artifact).interfaces
    else:
        found = artifact.load_device_code().interfaces()
    if found is None:
        raise ArtifactError(
            f"{artifact.folder}: the hot device's code does not say what its kernels are; compile it again"
        )
    return found
