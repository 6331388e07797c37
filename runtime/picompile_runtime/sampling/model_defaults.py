"""The model's own defaults for choosing tokens: the values of its generation_config.json.

`run`, `chat` and `serve` take them where the user or the request does not say, as transformers' `generate` and vLLM's
`--generation-config auto` do; `compile` reads them with the same function, and refuses a file whose values make no
sense. A value of null is one that is not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.errors import ArtifactError, RequestError
from picompile_runtime.request_checks import shown
from picompile_runtime.sampling.sampler import SamplingParams

FILE = "generation_config.json"
# The fields that are read, each as `SamplingParams` takes it; vLLM takes the same.
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# Fields of transformers' GenerationConfig that change which tokens come, and are not read, with the values that change
# nothing (generation/configuration_utils.py, and generation/utils.py for when each has an effect).
UNREAD: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "token_healing": (),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}


def sampling_defaults(config: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """Return `base` with the values that a generation_config.json gives.

    `"do_sample": false` is a temperature of 0, as it makes transformers take the likeliest token.

    Args:
        config: the file's content.
        base: the values of what it does not give.

    Raises:
        RequestError: a value makes no sense; the error begins with the field's name.
    """
    given: dict[str, Any] = {name: config[name] for name in FIELDS if config.get(name) is not None}
    samples = config.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise RequestError(f"do_sample must be true or false, not {shown(samples)}")
    read = replace(base, **given)
    return replace(read, temperature=0.0) if samples is False else read


def artifact_defaults(artifact: Artifact, base: SamplingParams | None = None) -> SamplingParams:
    """Return `base` with the values of an artifact's generation_config.json, if it has one.

    Without a `base`, what the file does not say has the defaults of `SamplingParams`, which are llama.cpp's.

    Raises ArtifactError, which names the file, if a value makes no sense.
    """
    try:
        return sampling_defaults(artifact.json(FILE), base or SamplingParams())
    except RequestError as error:
        raise ArtifactError(
            f"{artifact.folder / FILE}: {error}; correct the checkpoint's, and compile again"
        ) from error


def unread_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that would change which tokens come, and that nothing here reads."""
    return [name for name, neutral in UNREAD.items() if not _is_nothing(config.get(name), neutral)]


def _is_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None or value is False or value in ([], {}):  # 0 is a token
        return True
    return not isinstance(value, bool) and value in neutral
