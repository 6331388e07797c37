"""Sampling defaults of a GGUF file (its keys `general.sampling.*`), as the contents of generation_config.json.

llama.cpp takes them where no option says otherwise; its converter makes them of generation_config.json
(ggml-org/llama.cpp#17120).
"""

from dataclasses import replace
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.values import shortest
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.model_defaults import sampling_defaults
from picompile_runtime.sampling.sampler import SamplingParams

_PREFIX = "general.sampling."
# llama.cpp's name → that of generation_config.json.
_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Keys that are not read; above 0 they change which tokens come.
_UNREAD = ("xtc_probability", "mirostat")
# Tokens that llama.cpp never chooses: MiniMax's have embeddings of zeros.
_SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def with_sampling(files: TokenizerFiles, header: GgufHeader) -> TokenizerFiles:
    """Return a tokenizer with the file's sampling parameters in generation_config.

    Raises `UnsupportedModelError` for values that make no sense.
    """
    found = {name: value for key, name in _NAMES.items() if (value := _value(header, key)) is not None}
    try:
        sampling_defaults(found, SamplingParams())
    except RequestError as error:
        raise UnsupportedModelError(f"{header.file}: {_PREFIX}*: {error}") from error
    unread = [f"{_PREFIX}{key}" for key in _UNREAD if header.values.get(_PREFIX + key, 0) > 0]
    unread += [_SUPPRESSED] if _SUPPRESSED in header.arrays else []
    note = f"{', '.join(unread)} would change which tokens come, and picompile does not read them"
    notes = (*files.notes, note) if unread else files.notes
    return replace(files, generation_config={**found, **files.generation_config}, notes=notes)


def _value(header: GgufHeader, key: str) -> Any:
    """Return a value as generation_config.json has it; None if the file does not have it.

    llama.cpp takes the likeliest token at any temperature up to 0, and keeps all tokens at any top_k up to 0 and at any
    top_p from 1 on.
    """
    given = header.values.get(_PREFIX + key)
    if given is None:
        return None
    value = given if isinstance(given, int) else shortest(given)
    return {"temp": max(value, 0.0), "top_k": max(value, 0), "top_p": min(value, 1.0)}.get(key, value)
