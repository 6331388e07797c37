"""Opens an artifact's folder: everything in it is checked before any of its code is mapped.

A changed byte in `host.so` can kill the process or, worse, compute something else; so hashes are checked first. They
show that the artifact is whole, not that its maker meant well: an artifact is code, so run only those you trust.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from picompile_runtime.artifact.fields import parse_object
from picompile_runtime.artifact.files import (
    Progress,
    artifact_folder,
    check_hash,
    check_size,
    close_descriptors,
    duplicate_descriptors,
    hash_file,
    open_file,
    read_small_file,
    size_and_time,
    translate_system_errors,
)
from picompile_runtime.artifact.interfaces import CodeVariant, choose_variant
from picompile_runtime.artifact.manifest import PROGRAM, WEIGHTS, Manifest, read_manifest
from picompile_runtime.artifact.program import Argument, Program
from picompile_runtime.artifact.program_file import read_program
from picompile_runtime.artifact.weights import read_header
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import Tensor, array_at, map_file
from picompile_runtime.errors import ArtifactError
from picompile_runtime.verified_files import is_verified, mark_verified

# A reader begins again this often only if somebody replaces the artifact without a pause.
_MOST_READS = 100


@dataclass(frozen=True)
class Artifact:
    """An opened artifact.

    `texts` has its small files by name. `weights` is mapped; code is mapped only by `load_code`. `descriptors` are
    those of weights and code by file name, `weights_facts` the weights file's size and time when it was checked. `isa`
    is the instruction set that was asked for.
    """

    folder: Path
    manifest: Manifest
    program: Program
    tensors: Mapping[str, Tensor]
    weights: mmap.mmap
    texts: Mapping[str, bytes]
    descriptors: Mapping[str, int]
    weights_facts: tuple[int, int]
    isa: str | None = None
    _close_files: Callable[[], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Closed once, however often `close` is called: after that, other files have the same numbers.
        descriptors = [*self.descriptors.values()]
        object.__setattr__(self, "_close_files", weakref.finalize(self, close_descriptors, descriptors))

    @property
    def variant(self) -> CodeVariant:
        """The code to use here. Raises MachineError if none runs here, RequestError for a wrong PICOMPILE_ISA."""
        return choose_variant(self.manifest.code, self.isa)

    def load_code(self, variant: CodeVariant | None = None) -> HostLibrary:
        """Map and return the code of `variant`, by default the one to use here.

        Raises ArtifactError if it lacks a kernel that the program calls.
        """
        return self._load((variant or self.variant).file, "host")

    def load_accelerator_code(self, variant: CodeVariant | None = None) -> HostLibrary:
        """Map and return the code for an accelerator that is a partition of the CPU, as `load_code` does."""
        code = self.manifest.accelerator
        return self._load(
            (variant or choose_variant(() if code is None else code.variants, self.isa)).file, "accelerator"
        )

    def _load(self, file: str, device: str) -> HostLibrary:
        sha256 = self.manifest.files[file].sha256
        library = HostLibrary(f"/proc/self/fd/{self.descriptors[file]}", str(self.folder / file), sha256)
        for kernel in {call.kernel for name in self.program.functions for call in self.program.calls(name, device)}:
            library.kernel(kernel)
        return library

    def weight(self, argument: Argument) -> NDArray[Any]:
        """Return the numbers that a call is given of a weight, in the mapped file."""
        offset = self.tensors[argument.name].offset + argument.view.offset
        return array_at(self.weights, replace(argument.view, offset=offset))

    def json(self, name: str) -> Mapping[str, Any]:
        """Return one of the small JSON files as a mapping; empty if the artifact has none of that name."""
        if name not in self.texts:
            return {}
        return parse_object(self.texts[name], str(self.folder / name), unique=False).data

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, from the model's facts and from its generation defaults."""
        found: set[int] = set()
        defaults = self.json("generation_config.json")
        for value in (self.manifest.model.get("eos_token_ids"), defaults.get("eos_token_id")):
            found.update(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)
        return frozenset(found)

    def check_weights(self) -> None:
        """Raise ArtifactError if the weights file was written to since it was checked."""
        if size_and_time(self.descriptors[WEIGHTS]) != self.weights_facts:
            raise ArtifactError(f"{self.folder / WEIGHTS}: was changed while it is in use; load the artifact again")

    def close(self) -> None:
        """Unmap the weights, unless arrays over them are still in use, and close the files."""
        with suppress(BufferError):
            self.weights.close()
        self._close_files()


def open_artifact(path: str | os.PathLike[str], isa: str | None = None) -> Artifact:
    """Open and check the artifact in the folder `path`, and return it, to be run with the code for `isa`.

    Weights that were hashed before, and have not changed since, are not hashed again.

    Raises:
        ArtifactError: the artifact is not whole or not valid.
        MachineError: it was made for another kind of machine.
        DoesNotFitError: this process has too little memory, or may not open more files.
        RequestError: `path` cannot be a path, or the artifact has no code for `isa`.
    """
    folder = artifact_folder(path)

    def read() -> Artifact:
        manifest = read_manifest(folder)
        choose_variant(manifest.code, isa)  # before any weights are hashed
        return _open(folder, manifest, None, trust_stamps=True, isa=isa)

    with translate_system_errors(folder):
        return _of_one_folder(folder, read)


def open_hashed(path: str | os.PathLike[str], progress: Progress | None = None) -> Artifact:
    """Open the artifact in the folder `path` as `open_artifact` does, and hash every byte whatever is known of it.

    `progress` is called with a file's name, how many of its bytes are checked, and its size in bytes.
    """
    folder = artifact_folder(path)

    def read() -> Artifact:
        return _open(folder, read_manifest(folder), progress, trust_stamps=False)

    with translate_system_errors(folder):
        return _of_one_folder(folder, read)


def _of_one_folder(folder: Path, read: Callable[[], Artifact]) -> Artifact:
    """Return what `read` returns, and call it again if another artifact took the folder's name meanwhile.

    Files of the two would not fit together, and the older ones may be gone.
    """
    for _ in range(_MOST_READS - 1):
        before = _identity(folder)
        try:
            return read()
        except ArtifactError:
            if before is None or _identity(folder) == before:
                raise
    return read()


def _identity(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):  # ValueError: a name that no path can have
        status = os.stat(folder)
        return status.st_dev, status.st_ino
    return None


def _open(
    folder: Path, manifest: Manifest, progress: Progress | None, trust_stamps: bool, isa: str | None = None
) -> Artifact:
    texts: dict[str, bytes] = {}
    of_device = () if manifest.accelerator is None else manifest.accelerator.variants
    code = {variant.file for variant in (*manifest.code, *of_device)}
    with ExitStack() as stack:
        kept, weights_facts = {}, (0, 0)
        for name, entry in manifest.files.items():
            descriptor = open_file(folder, name, stack)
            check_size(descriptor, entry, folder / name)
            if name == WEIGHTS or name in code:
                kept[name] = descriptor
                weights_facts = size_and_time(descriptor) if name == WEIGHTS else weights_facts  # before it is hashed
                stamped = name == WEIGHTS and trust_stamps and is_verified(folder / name, descriptor, manifest.sha256)
                if not stamped:
                    check_hash(hash_file(descriptor, entry, name, progress), entry, folder / name)
                    if name == WEIGHTS:
                        mark_verified(folder / name, descriptor, manifest.sha256)
            else:
                texts[name] = read_small_file(descriptor, str(folder / name))
                check_hash(hashlib.sha256(texts[name]).hexdigest(), entry, folder / name)
                if progress:
                    progress(name, entry.size_bytes, entry.size_bytes)
        if manifest.files[WEIGHTS].size_bytes == 0:
            raise ArtifactError(f"{folder / WEIGHTS}: is empty; compile the model again")
        weights = map_file(kept[WEIGHTS])
        tensors = read_header(weights, str(folder / WEIGHTS))
        program = read_program(texts.pop(PROGRAM), tensors, str(folder / PROGRAM))
        sizes = (program.context, program.chunk, program.sequences)
        if sizes != (manifest.context, manifest.chunk, manifest.sequences):
            raise ArtifactError(f"{folder}: manifest.json and program.json disagree on context, chunk or sequences")
        descriptors = duplicate_descriptors({name: kept[name] for name in sorted({*code, WEIGHTS})})
        return Artifact(folder, manifest, program, tensors, weights, texts, descriptors, weights_facts, isa)
