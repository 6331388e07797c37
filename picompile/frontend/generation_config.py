"""A checkpoint's generation_config.json, read before anything is compiled as the artifact's readers will read it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.json_file import read_json_object
from picompile.frontend.model_file import CONFIG
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.model_defaults import FIELDS, FILE, UNREAD, sampling_defaults, unread_fields
from picompile_runtime.sampling.sampler import SamplingParams


def read_generation_config(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that says how a checkpoint's tokens are chosen, and what it says.

    Without a generation_config.json it is config.json, of which transformers makes one
    (`GenerationConfig.from_model_config`); fields of the model itself come before those of its text_config. Raises
    `UnsupportedModelError` for a file that is no JSON object.
    """
    path = checkpoint / FILE
    if path.is_file():
        return path, read_json_object(path)
    path = checkpoint / CONFIG
    config = read_json_object(path) if path.is_file() else {}
    text = config.get("text_config")
    both = {**(text if isinstance(text, Mapping) else {}), **config}
    return path, {name: both[name] for name in ("do_sample", *FIELDS, *UNREAD) if both.get(name) is not None}


def check_generation_config(checkpoint: Path) -> str | None:
    """Return a line for the user on the fields of generation_config.json that are not read; None if there are none.

    Raises `UnsupportedModelError` if a value makes no sense, with which `run`, `chat` and `serve` would fail.
    """
    path, config = read_generation_config(checkpoint)
    try:
        sampling_defaults(config, SamplingParams())
    except RequestError as error:
        raise UnsupportedModelError(f"{path}: {error}; correct it, or remove the field") from error
    unread = unread_fields(config)
    if not unread:
        return None
    return f"{path.name}: {', '.join(unread)} would change which tokens come, and picompile does not read them"
