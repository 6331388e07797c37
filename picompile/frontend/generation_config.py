"""A checkpoint's generation_config.json, read before anything is compiled as the artifact's readers will read it."""

from pathlib import Path

from picompile.errors import UnsupportedModelError
from picompile.frontend.json_file import read_json_object
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.model_defaults import FILE, sampling_defaults, unread_fields
from picompile_runtime.sampling.sampler import SamplingParams


def check_generation_config(checkpoint: Path) -> str | None:
    """Return a line for the user on the fields of generation_config.json that are not read; None if there are none.

    Raises `UnsupportedModelError` if a value makes no sense, with which `run`, `chat` and `serve` would fail.
    """
    path = checkpoint / FILE
    if not path.is_file():
        return None
    config = read_json_object(path)
    try:
        sampling_defaults(config, SamplingParams())
    except RequestError as error:
        raise UnsupportedModelError(f"{path}: {error}; correct it, or remove the field") from error
    unread = unread_fields(config)
    if not unread:
        return None
    return f"{FILE}: {', '.join(unread)} would change which tokens come, and picompile does not read them"
