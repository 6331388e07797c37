"""A model that is split over several GGUF files: the header of the first has the metadata, and each has tensors.

llama.cpp's `gguf-split` and converter name the parts `NAME-00001-of-00003.gguf` and number them in their metadata.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.gguf.header import GgufHeader, TensorEntry, read_header

PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_PARTS = 1000
# Of a header's arrays. Gemma has 262,144 tokens, and two numbers and two merges for each.
MOST_MODEL_ELEMENTS = 4 << 20


def part_files(first: Path) -> list[Path]:
    """Return `first` and the files that its name promises beside it, whether they are there or not."""
    match = PART.fullmatch(first.name)
    if match is None or not 1 < int(match[3]) <= _MOST_PARTS:
        return [first]
    others = (first.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(2, int(match[3]) + 1))
    return [first, *others]


def models_in(folder: Path) -> list[Path]:
    """Return the GGUF files in `folder` that are models: of parts the first, or whichever is there of them."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        match = PART.fullmatch(file.name)
        found.setdefault(file.name if match is None else f"{match[1]}-of-{match[3]}", file)
    return list(found.values())


def model_name(file: Path) -> str:
    """Return the name of the model in `file`, without the number of a part."""
    match = PART.fullmatch(file.name)
    return file.stem if match is None else match[1]


def file_format(file: Path) -> str | None:
    """Return the format that a GGUF file calls its own, such as Q4_K_M; None where it names none that is known."""
    from gguf.constants import LlamaFileType

    try:
        name: str = LlamaFileType(read_header(file, MOST_MODEL_ELEMENTS).values.get("general.file_type")).name
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def read_model_header(file: Path, most_elements: int) -> GgufHeader:
    """Return the header of `file` with the tensors of all parts.

    Raises as `read_header` does, and `UnsupportedModelError`, in one line, for a part that is not the first, for one
    that is missing, and for parts that do not belong together.
    """
    header = read_header(file, most_elements)
    count = header.values.get(_COUNT, 1)
    if count in (0, 1):
        return header
    if type(count) is not int or not 1 < count <= _MOST_PARTS:
        raise UnsupportedModelError(f"{file}: {_COUNT} is {count!r:.40}; up to {_MOST_PARTS} parts are read")
    match = PART.fullmatch(file.name)
    number = header.values.get(_NUMBER)
    if match is None or int(match[3]) != count:
        raise UnsupportedModelError(
            f"{file}: a part of {count}, whose name must be NAME-00001-of-{count:05}.gguf for the others to be found"
        )
    if number != 0:
        first = file.with_name(f"{match[1]}-00001-of-{count:05}.gguf")
        part = number + 1 if type(number) is int else number
        raise UnsupportedModelError(f"{file}: part {part!r:.40} of {count}; name the first one, {first}")
    others = [_read_part(other, place, count, most_elements) for place, other in enumerate(part_files(file)[1:], 2)]
    return _joined(header, others)


def _read_part(file: Path, place: int, count: int, most_elements: int) -> GgufHeader:
    if not file.is_file():
        raise UnsupportedModelError(f"{file}: part {place} of {count} is missing")
    try:
        header = read_header(file, most_elements)
    except UsageError as error:
        raise UnsupportedModelError(str(error)) from error
    found = (header.values.get(_NUMBER), header.values.get(_COUNT))
    if found != (place - 1, count):
        raise UnsupportedModelError(
            f"{file}: not part {place} of {count}: its {_NUMBER} is {found[0]!r:.40} and its {_COUNT} {found[1]!r:.40}"
        )
    return header


def _joined(first: GgufHeader, others: Iterable[GgufHeader]) -> GgufHeader:
    tensors: dict[str, TensorEntry] = dict(first.tensors)
    for other in others:
        if other.magic != first.magic:
            raise UnsupportedModelError(f"{other.file}: a file of another kind than {first.file}")
        if both := tensors.keys() & other.tensors.keys():
            raise UnsupportedModelError(f"{other.file}: a part of another model: {min(both)} is in another part too")
        tensors |= other.tensors
    total = first.values.get(_TENSORS, len(tensors))
    if total != len(tensors):
        raise UnsupportedModelError(
            f"{first.file}: its parts have {len(tensors)} tensors, but {_TENSORS} is {total!r:.40}: a part is of "
            "another model"
        )
    return replace(first, tensors=tensors)
