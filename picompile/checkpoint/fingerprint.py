"""What a model is, in one number: for telling that a profile or predictors were made from another one."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from picompile.checkpoint.headers import check_folder, read_headers
from picompile.json_file import read_json_object

# Of the start and of the end of each tensor. Training changes every one of them; reading all would take a minute for
# each 100 GB.
_SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> str:
    """Hex digits that are the same for the same config.json and the same tensors, however these are spread over files.

    It depends on each tensor's name, dtype and shape and on 4 kB from either end of its data. Raises `UsageError` or
    `UnsupportedModelError`, as `load_model` does, for what is no model folder.
    """
    check_folder(folder)
    headers = read_headers(folder)
    digest = hashlib.sha256(_config(folder / "config.json"))
    samples = {
        name: data for file in sorted({header.file for header in headers.values()}) for name, data in _ends(file)
    }
    for name in sorted(headers):
        description = json.dumps([name, headers[name].dtype, headers[name].shape])
        digest.update(len(samples[name]).to_bytes(8, "little") + description.encode() + samples[name])
    return digest.hexdigest()


def _config(file: Path) -> bytes:
    return json.dumps(read_json_object(file), sort_keys=True).encode()


def _ends(file: Path) -> Iterator[tuple[str, bytes]]:
    """Each tensor's name and the samples of its data. The header was found whole by `read_headers`."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            opened.seek(8 + length + start)
            first = opened.read(min(_SAMPLE_BYTES, end - start))
            opened.seek(8 + length + max(start, end - _SAMPLE_BYTES))
            yield name, first + opened.read(min(_SAMPLE_BYTES, end - start))
