"""The hash of manifest.json that manifest.json itself has: that of its bytes with zeros in the place of the hash."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.artifact.interfaces import Variant, choose
from picompile_runtime.artifact.program import Program, read_program
from picompile_runtime.artifact.weights import read_header
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.memory import Tensor, map_file
from picompile_runtime.errors import ArtifactError
from picompile_runtime.stamps import is_stamped, stamp
from picompile_runtime.system_errors import folder_of, system_error, told_by_cause

KEY = "sha256"
_ZEROS = "0" * 64


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return `content` as the bytes of a manifest.json, with its hash."""
    others = {key: value for key, value in content.items() if key != KEY}
    text = (json.dumps({**others, KEY: _ZEROS}, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogatepass")
    # From the end: the model's facts come from the checkpoint, and a name may have zeros.
    before, _, after = text.rpartition(_ZEROS.encode())
    return before + hashlib.sha256(text).hexdigest().encode() + after


def is_sealed(text: bytes, own: str) -> bool:
    """Return whether `own`, the hash in the manifest `text`, is its hash."""
    before, found, after = text.rpartition(own.encode(errors="replace"))
    return bool(found) and hashlib.sha256(before + _ZEROS.encode() + after).hexdigest() == own


# An artifact's folder, opened: everything in it is checked before any of its code is mapped.
#
# A changed byte in `host.so` can kill the process or, worse, compute something else; hence hashes before anything. They
# show that the artifact is whole, not that its maker meant well: an artifact is code, so run only those you trust.


FORMAT = "picompile-artifact"
SCHEMA = 4
ABI = 1
WEIGHTS = "weights.safetensors"
PROGRAM = "program.json"
_MOST_JSON_BYTES = 2**28
# Only whoever replaces an artifact without a pause makes a reader begin again so often.
_MOST_READS = 100
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes of it that are checked, and its size."""


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class DeviceCode:
    """The code of the hot device.

    `kind` "cpu": `variants`, best first. "cuda": for compute capability `sm` (times ten), in the `files` cubin, ptx and
    launches.
    """

    kind: str
    variants: tuple[Variant, ...] = ()
    sm: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """manifest.json; `code` lists the best first, `model` are facts about the model as the compiler wrote them.
    `hot_device` is None where all runs on the host.
    """

    code: tuple[Variant, ...]
    hot_device: DeviceCode | None
    files: Mapping[str, FileEntry]
    model: Mapping[str, Any]
    quant: str
    predictor: str
    kv_dtype: str
    context: int
    chunk: int
    sequences: int
    sha256: str


@dataclass(frozen=True)
class Artifact:
    """An opened artifact. `texts` has its small files; `weights` is mapped, code only by `load_code`.

    `descriptors` are those of weights and code, `weights_facts` size and time of the weights' file when it was checked.
    """

    folder: Path
    manifest: Manifest
    program: Program
    tensors: Mapping[str, Tensor]
    weights: mmap.mmap
    texts: Mapping[str, bytes]
    descriptors: Mapping[str, int]
    weights_facts: tuple[int, int]
    _close_files: Callable[[], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once, whoever closes it and how often: by then the numbers are those of others' files.
        descriptors = [*self.descriptors.values()]
        object.__setattr__(self, "_close_files", weakref.finalize(self, _close_all, descriptors))

    @property
    def variant(self) -> Variant:
        """The code that is used here. Raises MachineError if none can be, RequestError for a wrong PICOMPILE_ISA."""
        return choose(self.manifest.code)

    def load_code(self, variant: Variant | None = None) -> HostLibrary:
        """Map the code of `variant`, or else of what `choose` takes; ArtifactError if it lacks a kernel."""
        return self._load((variant or self.variant).file, "host")

    def load_device_code(self, variant: Variant | None = None) -> HostLibrary:
        """The same for a hot device that is a partition of the CPU."""
        device = self.manifest.hot_device
        return self._load((variant or choose(() if device is None else device.variants)).file, "device")

    def _load(self, file: str, device: str) -> HostLibrary:
        sha256 = self.manifest.files[file].sha256
        library = HostLibrary(f"/proc/self/fd/{self.descriptors[file]}", str(self.folder / file), sha256)
        for kernel in {call.kernel for name in self.program.functions for call in self.program.calls(name, device)}:
            library.kernel(kernel)
        return library

    def json(self, name: str) -> Mapping[str, Any]:
        """One of the small JSON files as a mapping; empty if the artifact has none of that name."""
        if name not in self.texts:
            return {}
        return parse_object(self.texts[name], str(self.folder / name), unique=False).data

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, by the model's facts and by its generation defaults."""
        found: set[int] = set()
        defaults = self.json("generation_config.json")
        for value in (self.manifest.model.get("eos_token_ids"), defaults.get("eos_token_id")):
            found.update(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)
        return frozenset(found)

    def check_weights(self) -> None:
        """Raises ArtifactError if the file of the weights was written to since it was found whole."""
        if _facts(self.descriptors[WEIGHTS]) != self.weights_facts:
            raise ArtifactError(f"{self.folder / WEIGHTS}: was changed while it is in use; load the artifact again")

    def close(self) -> None:
        """Unmap the weights, unless arrays over them are still in use, and close the files."""
        with suppress(BufferError):
            self.weights.close()
        self._close_files()


def _facts(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _duplicates(descriptors: Mapping[str, int]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    try:
        for name, descriptor in descriptors.items():
            found[name] = os.dup(descriptor)
    except OSError:
        _close_all([*found.values()])
        raise
    return found


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Open the artifact in the folder `path`; its weights are not hashed again if they were found whole before.

    Raises ArtifactError if it is not whole, MachineError if it was made for another machine.
    """
    folder = folder_of(path)

    def read() -> Artifact:
        manifest = read_manifest(folder)
        choose(manifest.code)  # before weights are hashed for nothing
        return _open(folder, manifest, None, trust_stamps=True)

    with told_by_cause(folder):
        return _of_one_folder(folder, read)


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Manifest:
    """Check an artifact wholly, hashing every byte of it; of the code that runs here, its kernels too."""
    from picompile_runtime.artifact.call_order import check_code

    folder = folder_of(path)

    def read() -> Artifact:
        return _open(folder, read_manifest(folder), progress, trust_stamps=False)

    with told_by_cause(folder):
        artifact = _of_one_folder(folder, read)
        try:
            _verify_device(artifact)
            for variant in artifact.manifest.code:
                if variant.runs_here:
                    check_code(artifact, artifact.load_code(variant))
        finally:
            artifact.close()
    return artifact.manifest


def _of_one_folder(folder: Path, read: Callable[[], Artifact]) -> Artifact:
    """What `read` returns; it is asked again where another artifact took the folder's name meanwhile.

    Files of both would not fit together, and those of the one before may be gone.
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


def _verify_device(artifact: Artifact) -> None:
    """ArtifactError if the code of the hot device lacks a kernel."""
    device = artifact.manifest.hot_device
    if device is None:
        return
    if device.kind == "cuda":
        from picompile_runtime.devices.cuda.open import check_images

        check_images(artifact)
    for variant in device.variants:
        if variant.runs_here:
            artifact.load_device_code(variant)


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone; ArtifactError if `folder` holds no artifact that this runtime knows how to read."""
    where = str(folder / "manifest.json")
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: is not a folder; give the folder that `picompile compile -o` wrote")
    with ExitStack() as stack:
        text = _read(_open_file(folder, "manifest.json", stack), where)
    root = parse_object(text, where)
    if root.data.get("format") != FORMAT:
        raise ArtifactError(f"{where}: format is not {FORMAT}; this is no artifact of picompile")
    for key, known in (("schema", SCHEMA), ("abi", ABI)):
        if root.integer(key) != known:
            raise ArtifactError(
                f"{where}: {key} is {root.data[key]}, and this runtime knows {known}; "
                f"{'update the runtime' if root.data[key] > known else 'compile the model again'}"
            )
    if not is_sealed(text, root.text(KEY)):
        raise ArtifactError(f"{where}: was changed (its sha256 is not its own); copy or compile it again")
    files = _files(root.object("files"))
    return Manifest(
        code=_code(root, files),
        hot_device=_hot_device(root, files),
        files=files,
        model=root.object("model").data,
        quant=root.text("quant"),
        predictor=root.text("predictor"),
        kv_dtype=root.text("kv_dtype"),
        context=root.integer("context", 1),
        chunk=root.integer("chunk", 1),
        sequences=root.integer("sequences", 1),
        sha256=hashlib.sha256(text).hexdigest(),
    )


def _files(root: Fields) -> Mapping[str, FileEntry]:
    files = {}
    for name, entry in root.members().items():
        if not _NAME.fullmatch(name) or name == "manifest.json":
            raise ArtifactError(f"{root.where}: {name[:80]!r} is not the name of a file inside the artifact")
        if not re.fullmatch("[0-9a-f]{64}", entry.text("sha256")):
            raise entry.wrong("sha256", "64 hexadecimal digits")
        files[name] = FileEntry(entry.integer("bytes"), entry.text("sha256"))
    if missing := [name for name in (PROGRAM, WEIGHTS) if name not in files]:
        raise ArtifactError(f"{root.where}: {missing[0]} is missing; compile the model again")
    return files


def _hot_device(root: Fields, files: Mapping[str, FileEntry]) -> DeviceCode | None:
    if "hot_device" not in root.data:
        return None
    device = root.object("hot_device")
    if (kind := device.text("kind")) == "cpu":
        return DeviceCode(kind, _code(device, files))
    if kind != "cuda":
        raise device.wrong("kind", "cpu or cuda")
    names = {role: device.text(role) for role in ("cubin", "ptx", "launches")}
    for role, name in names.items():
        if name not in files:
            raise device.wrong(role, "one of the artifact's files")
    return DeviceCode(kind, sm=device.integer("sm", 10, 999), files=names)


def _code(root: Fields, files: Mapping[str, FileEntry]) -> tuple[Variant, ...]:
    variants = []
    for entry in root.objects("code"):
        variant = Variant(entry.text("isa"), entry.text("machine"), entry.texts("features"), entry.text("file"))
        if variant.file not in files or variant.file in (PROGRAM, WEIGHTS):
            raise entry.wrong("file", "one of the artifact's files")
        variants.append(variant)
    if not variants:
        raise root.wrong("code", "a list of one variant or more")
    return tuple(variants)


def _open(folder: Path, manifest: Manifest, progress: Progress | None, trust_stamps: bool) -> Artifact:
    texts: dict[str, bytes] = {}
    of_device = () if manifest.hot_device is None else manifest.hot_device.variants
    code = {variant.file for variant in (*manifest.code, *of_device)}
    with ExitStack() as stack:
        kept, weights_facts = {}, (0, 0)
        for name, entry in manifest.files.items():
            descriptor = _open_file(folder, name, stack)
            _check_size(descriptor, entry, folder / name)
            if name == WEIGHTS or name in code:
                kept[name] = descriptor
                weights_facts = _facts(descriptor) if name == WEIGHTS else weights_facts  # before it is hashed
                stamped = name == WEIGHTS and trust_stamps and is_stamped(folder / name, descriptor, manifest.sha256)
                if not stamped:
                    _check_hash(_hash(descriptor, entry, name, progress), entry, folder / name)
                    if name == WEIGHTS:
                        stamp(folder / name, descriptor, manifest.sha256)
            else:
                texts[name] = _read(descriptor, str(folder / name))
                _check_hash(hashlib.sha256(texts[name]).hexdigest(), entry, folder / name)
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
        descriptors = _duplicates({name: kept[name] for name in sorted({*code, WEIGHTS})})
        return Artifact(folder, manifest, program, tensors, weights, texts, descriptors, weights_facts)


def _open_file(folder: Path, name: str, stack: ExitStack) -> int:
    """A descriptor of a regular file inside the folder that no symbolic link leads out of; closed by `stack`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        parts = name.split("/")
        for index, part in enumerate(parts):
            kind = os.O_DIRECTORY if index < len(parts) - 1 else os.O_NONBLOCK  # a pipe must not make us wait
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=descriptor)
            stack.callback(os.close, descriptor)
    except OSError as error:
        raise system_error(folder / name, error) from error
    if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
        raise ArtifactError(f"{folder / name}: is not a regular file")
    return descriptor


def _read(descriptor: int, where: str) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > _MOST_JSON_BYTES:
        raise ArtifactError(f"{where}: has {size} bytes, and at most {_MOST_JSON_BYTES} are read")
    return os.pread(descriptor, size, 0)


def _check_size(descriptor: int, entry: FileEntry, path: Path) -> None:
    size = os.fstat(descriptor).st_size
    if size != entry.size_bytes:
        raise ArtifactError(f"{path}: has {size} bytes instead of {entry.size_bytes}; copy or compile it again")


def _hash(descriptor: int, entry: FileEntry, name: str, progress: Progress | None) -> str:
    digest, block, done = hashlib.sha256(), bytearray(2**22), 0
    while count := os.preadv(descriptor, [block], done):
        digest.update(memoryview(block)[:count])
        done += count
        if progress:
            progress(name, min(done, entry.size_bytes), entry.size_bytes)
    return digest.hexdigest()


def _check_hash(found: str, entry: FileEntry, path: Path) -> None:
    if found != entry.sha256:
        raise ArtifactError(f"{path}: was changed (its sha256 is not the manifest's); copy or compile it again")
