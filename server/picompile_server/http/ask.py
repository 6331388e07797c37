"""Conversion of a request's fields to requests of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from picompile_runtime.sampling.sampler import SamplingParams
from picompile_server.http.errors import ApiError
from picompile_server.http.fields import TextBody
from picompile_server.model import ServedModel

_SEEDS = 2**64


def sampling_params(body: TextBody, model: ServedModel) -> SamplingParams:
    """Return how to choose tokens: as the request says, else as the model's defaults do. Its seed is for index 0."""
    penalty = body.repetition_penalty if body.repetition_penalty is not None else body.repeat_penalty
    wanted: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "seed": None if body.seed is None else body.seed % _SEEDS,
    }
    return replace(model.defaults, **{name: value for name, value in wanted.items() if value is not None})


def with_index(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of the answer at `index` of those to one prompt: with a seed each has its own."""
    return params if params.seed is None else replace(params, seed=(params.seed + index) % _SEEDS)


def check_letters(letters: int, model: ServedModel) -> None:
    """Raise ApiError if a text of so many characters cannot fit: to cut it into tokens would hold up everybody."""
    if letters > model.most_letters:
        raise _does_not_fit(
            f"a prompt of {letters} characters", letters * model.engine.context // model.most_letters, model
        )


def check_prompt(ids: Sequence[int], model: ServedModel, generates: bool = True) -> None:
    """Raise ApiError unless a prompt has tokens, all of the model's, and leaves room for an answer."""
    if not ids:
        raise ApiError(
            400, "the prompt is empty, and this model has no token that begins a text; give a prompt", param="prompt"
        )
    context = model.engine.context
    if len(ids) > context - generates:
        what = f"a prompt of {len(ids)} tokens" + (" and an answer" if len(ids) == context else "")
        raise _does_not_fit(what, len(ids), model)
    if max(ids) >= model.engine.vocab or min(ids) < 0:
        raise ApiError(400, f"tokens must be integers from 0 to {model.engine.vocab - 1}", param="prompt")


def _does_not_fit(what: str, tokens: int, model: ServedModel) -> ApiError:
    context = model.engine.context
    return ApiError(
        400,
        f"{what} {'do' if ' and ' in what else 'does'} not fit the model's context of {context} tokens; "
        "shorten it, or compile for a larger --context",
        code="context_length_exceeded",
        details={"n_prompt_tokens": tokens, "n_ctx": context},
    )
