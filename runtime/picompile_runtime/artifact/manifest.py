"""manifest.json: what an artifact consists of, which machines it is for, and the hashes of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.artifact.files import FileEntry, open_file, read_small_file
from picompile_runtime.artifact.interfaces import CodeVariant
from picompile_runtime.errors import ArtifactError

FORMAT = "picompile-artifact"
SCHEMA = 4
ABI = 1
WEIGHTS = "weights.safetensors"
PROGRAM = "program.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
# The manifest contains its own hash: that of its bytes with zeros in the place of the hash.
_HASH_KEY = "sha256"
_ZEROS = "0" * 64


@dataclass(frozen=True)
class AcceleratorCode:
    """The code for the accelerator, of the kind that a back end of this name makes it for.

    `variants` lists code for processors, best first. `files` names others by their roles; a GPU's is for compute
    capability `sm` (times ten).
    """

    kind: str
    variants: tuple[CodeVariant, ...] = ()
    sm: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    `code` lists the host's code, best first. `accelerator` is None where everything runs on the host. `model` has facts
    about the model as the compiler wrote them. `sha256` is the hash of the file itself.
    """

    code: tuple[CodeVariant, ...]
    accelerator: AcceleratorCode | None
    files: Mapping[str, FileEntry]
    model: Mapping[str, Any]
    quant: str
    predictor: str
    kv_dtype: str
    context: int
    chunk: int
    sequences: int
    sha256: str


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return `content` as the bytes of a manifest.json, with the manifest's own hash in it."""
    others = {key: value for key, value in content.items() if key != _HASH_KEY}
    text = (json.dumps({**others, _HASH_KEY: _ZEROS}, indent=1, ensure_ascii=False) + "\n").encode(
        errors="surrogatepass"
    )
    # From the end: the model's facts come from the checkpoint, and a name may have zeros.
    before, _, after = text.rpartition(_ZEROS.encode())
    return before + hashlib.sha256(text).hexdigest().encode() + after


def _is_sealed(text: bytes, own: str) -> bool:
    """Return whether `own`, the hash that the manifest `text` contains, is the manifest's hash."""
    before, found, after = text.rpartition(own.encode(errors="replace"))
    return bool(found) and hashlib.sha256(before + _ZEROS.encode() + after).hexdigest() == own


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the artifact in `folder`, and check no other file.

    Raises ArtifactError if `folder` holds no artifact that this runtime can read.
    """
    where = str(folder / "manifest.json")
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: is not a folder; give the folder that `picompile compile -o` wrote")
    if not (folder / "manifest.json").exists() and (folder / "config.json").exists():
        raise ArtifactError(
            f"{folder}: is a checkpoint and no artifact; `picompile compile {folder} -o ARTIFACT` makes one"
        )
    with ExitStack() as stack:
        text = read_small_file(open_file(folder, "manifest.json", stack), where)
    root = parse_object(text, where)
    if root.data.get("format") != FORMAT:
        raise ArtifactError(f"{where}: format is not {FORMAT}; this is no artifact of picompile")
    for key, known in (("schema", SCHEMA), ("abi", ABI)):
        if root.integer(key) != known:
            raise ArtifactError(
                f"{where}: {key} is {root.data[key]}, and this runtime knows {known}; "
                f"{'update the runtime' if root.data[key] > known else 'compile the model again'}"
            )
    if not _is_sealed(text, root.text(_HASH_KEY)):
        raise ArtifactError(f"{where}: was changed (its sha256 is not its own); copy or compile it again")
    files = _files(root.object("files"))
    return Manifest(
        code=_code(root, files),
        accelerator=_accelerator(root, files),
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
        if not _FILE_NAME.fullmatch(name) or name == "manifest.json":
            raise ArtifactError(f"{root.where}: {name[:80]!r} is not the name of a file inside the artifact")
        if not re.fullmatch("[0-9a-f]{64}", entry.text("sha256")):
            raise entry.wrong("sha256", "64 hexadecimal digits")
        files[name] = FileEntry(entry.integer("bytes"), entry.text("sha256"))
    if missing := [name for name in (PROGRAM, WEIGHTS) if name not in files]:
        raise ArtifactError(f"{root.where}: {missing[0]} is missing; compile the model again")
    return files


def _accelerator(root: Fields, files: Mapping[str, FileEntry]) -> AcceleratorCode | None:
    if "accelerator" not in root.data:
        return None
    entry = root.object("accelerator")
    names = {role: name for role, name in entry.data.items() if isinstance(name, str) and role != "kind"}
    for role, name in names.items():
        if name not in files:
            raise entry.wrong(role, "one of the artifact's files")
    return AcceleratorCode(
        entry.text("kind"),
        variants=_code(entry, files) if "code" in entry.data else (),
        sm=entry.integer("sm", 10, 999) if "sm" in entry.data else 0,
        files=names,
    )


def _code(root: Fields, files: Mapping[str, FileEntry]) -> tuple[CodeVariant, ...]:
    variants = []
    for entry in root.objects("code"):
        variant = CodeVariant(entry.text("isa"), entry.text("machine"), entry.texts("features"), entry.text("file"))
        if variant.file not in files or variant.file in (PROGRAM, WEIGHTS):
            raise entry.wrong("file", "one of the artifact's files")
        variants.append(variant)
    if not variants:
        raise root.wrong("code", "a list of one variant or more")
    return tuple(variants)
