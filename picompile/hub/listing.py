"""Which files of a repository make the model that a name means. Nothing here reads the network or a disk.

A checkpoint in safetensors needs its weights and the small files beside them. A GGUF model needs its file, or all its
parts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from picompile.errors import DoesNotFitError, UnsupportedModelError, UsageError
from picompile.frontend.gguf.parts import PART
from picompile.hub.names import ModelName
from picompile_runtime.devices.memory import in_units

# llama.cpp's default, too: about 4.8 bits a weight.
PREFERRED = "Q4_K_M"
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])((?:UD[-_])?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_FLOATS = ("BF16", "F16", "FP16", "F32", "FP32")
# Projectors of images, matrices of importance and vocabularies are GGUF files, and no models.
_NO_MODEL = re.compile(r"mmproj|imatrix|vocab[-_.]", re.IGNORECASE)
# Files beside the weights: configs, tokenizers, chat templates.
READ_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_LICENCE = re.compile(r"LICENSE[^/]*", re.IGNORECASE)
# Tokens, cache and code beside the weights; see `fits`.
_OTHER_BYTES = 10**9
_NAMED_LABELS = 12


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        path: its path there.
        size_bytes: its size.
        sha256: of its content, if the hub knows that (files in Git LFS), else None.
        sha1: Git's name of its content, if it is not in Git LFS, else None.
    """

    path: str
    size_bytes: int
    sha256: str | None = None
    sha1: str | None = None


@dataclass(frozen=True)
class GgufModel:
    """A GGUF model of a repository: its file, or its parts in order.

    Attributes:
        files: the file, or the parts.
        label: the format that the file's name ends with, as in `Q4_K_M`; empty if it names none.
    """

    files: tuple[RepoFile, ...]
    label: str

    @property
    def size_bytes(self) -> int:
        """The size of all parts."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Choice:
    """The files of the model that a name means. `gguf` is its first file, None for a checkpoint in safetensors."""

    files: tuple[RepoFile, ...]
    gguf: str | None


def choose_files(name: ModelName, files: Sequence[RepoFile], memory_bytes: int) -> Choice:
    """Return the files of the model that `name` means.

    Without a choice in the name a checkpoint in safetensors comes first. Of several GGUF models, it is the one in
    Q4_K_M if that fits `memory_bytes`, else the largest quantized one that does.

    Raises:
        UsageError: the name chooses what the repository does not have.
        UnsupportedModelError: the repository has no weights that are read.
        DoesNotFitError: no GGUF model fits the memory.
    """
    models = gguf_models(files)
    checkpoint = _checkpoint(files) if name.choice is None else ()
    if checkpoint:
        return Choice(checkpoint, None)
    if not models:
        raise _no_model(name, files)
    model = _chosen(name, models) if name.choice is not None else _best(name, models, memory_bytes)
    return Choice(model.files, model.files[0].path)


def fits(size_bytes: int, memory_bytes: int) -> bool:
    """Return whether a model of that size runs in a machine's memory: packing adds a little, and so does its cache."""
    return size_bytes + size_bytes // 10 + _OTHER_BYTES <= memory_bytes


def gguf_models(files: Iterable[RepoFile]) -> list[GgufModel]:
    """Return the GGUF models among `files`, without those whose parts are incomplete."""
    groups: dict[str, list[RepoFile]] = {}
    counts: dict[str, int] = {}
    for file in sorted(files, key=lambda each: each.path):
        path = PurePosixPath(file.path)
        if path.suffix.lower() != ".gguf" or _NO_MODEL.search(path.name):
            continue
        match = PART.fullmatch(path.name)
        key = file.path if match is None else f"{path.parent}/{match[1]}-of-{match[3]}"
        groups.setdefault(key, []).append(file)
        counts[key] = 1 if match is None else int(match[3])
    return [GgufModel(tuple(group), _label(group[0])) for key, group in groups.items() if len(group) == counts[key]]


def _label(file: RepoFile) -> str:
    found = _LABEL.findall(PurePosixPath(file.path).name)
    return found[-1].upper() if found else ""


def _checkpoint(files: Sequence[RepoFile]) -> tuple[RepoFile, ...]:
    """Return the files of the checkpoint in safetensors at the top of a repository; none if there is none."""
    names = {file.path for file in files}
    weights = [file for file in files if re.fullmatch(r"[^/]+\.safetensors", file.path)]
    # Some repositories have the same weights once more, as `consolidated.safetensors`.
    weights = [file for file in weights if file.path.startswith("model")] or weights
    if "config.json" not in names or not weights:
        return ()
    return (*(file for file in files if _is_beside(file.path)), *weights)


def _is_beside(path: str) -> bool:
    return "/" not in path and (path.lower().endswith(READ_BESIDE) or _LICENCE.fullmatch(path) is not None)


def _chosen(name: ModelName, models: Sequence[GgufModel]) -> GgufModel:
    """Return the model that `name` chooses, by its format or its path."""
    choice = str(name.choice).upper()
    for matches in (
        [model for model in models if model.files[0].path.upper() in (choice, f"{choice}.GGUF")],
        [model for model in models if model.label == choice],
        [model for model in models if re.search(rf"(?<![A-Z0-9]){re.escape(choice)}(?![A-Z0-9])", _stem(model))],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            paths = ", ".join(f"hf://{name.repo}/{model.files[0].path}" for model in matches[:_NAMED_LABELS])
            raise UsageError(f"{name}: several files match; name one of {paths}")
    raise UsageError(f"{name}: {name.repo} has no GGUF model {name.choice}; it has {_labels(models)}")


def _stem(model: GgufModel) -> str:
    return PurePosixPath(model.files[0].path).stem.upper()


def _best(name: ModelName, models: Sequence[GgufModel], memory_bytes: int) -> GgufModel:
    fitting = [model for model in models if fits(model.size_bytes, memory_bytes)]
    if not fitting:
        smallest = min(models, key=lambda model: model.size_bytes)
        needed, memory = in_units(smallest.size_bytes + _OTHER_BYTES, memory_bytes)
        raise DoesNotFitError(
            f"{name}: its smallest model, {smallest.label or smallest.files[0].path}, needs about {needed} of memory, "
            f"and this machine has {memory}; choose a smaller model, or name a format to take it anyway"
        )
    for model in fitting:
        if model.label == PREFERRED:
            return model
    quantized = [model for model in fitting if model.label not in _FLOATS]
    return max(quantized or fitting, key=lambda model: model.size_bytes)


def _labels(models: Sequence[GgufModel]) -> str:
    labels = sorted({model.label or model.files[0].path for model in models})
    more = f" and {len(labels) - _NAMED_LABELS} more" if len(labels) > _NAMED_LABELS else ""
    return f"{', '.join(labels[:_NAMED_LABELS])}{more}"


def _no_model(name: ModelName, files: Sequence[RepoFile]) -> Exception:
    if name.choice is not None and any(file.path.endswith(".safetensors") for file in files):
        return UsageError(f"{name}: {name.repo} has no GGUF files; write {name.repo} for its safetensors checkpoint")
    found = sorted({PurePosixPath(file.path).suffix for file in files} & {".bin", ".pt", ".pth", ".onnx", ".msgpack"})
    has = f"; it has {', '.join(found)} files, which are not read" if found else ""
    return UnsupportedModelError(f"{name}: the repository has no safetensors checkpoint and no GGUF model{has}")
