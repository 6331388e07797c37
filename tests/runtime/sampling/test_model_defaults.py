"""Sampling defaults of generation_config.json: what run, chat and serve make of each value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picompile_runtime import ArtifactError, RequestError, SamplingParams
from picompile_runtime.artifact.reader import open_artifact
from picompile_runtime.run_options import RUN_OPTIONS
from picompile_runtime.sampling.model_defaults import artifact_defaults, sampling_defaults, unread_fields
from picompile_runtime.sampling.option_values import OptionValues
from picompile_runtime.sampling.sampler import Sampler

BASE = SamplingParams(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {}),
        # Off: 0 with transformers, -1 with vLLM and llama.cpp, and as writers have it that know only floats.
        *(({"top_k": value}, {"top_k": 0}) for value in (0, -1, -1.0, 0.0)),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"top_p": 0.0}, {"top_p": 0.0}),
        ({"top_p": 1}, {"top_p": 1}),
        ({"temperature": 0, "min_p": 0}, {"temperature": 0, "min_p": 0}),
        (dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")), {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"eos_token_id": 3, "max_new_tokens": 5, "seed": 3, "logit_bias": 7}, {}),
    ],
)
def test_values_have_one_meaning(config: dict[str, Any], changes: dict[str, Any]) -> None:
    read = sampling_defaults(config, BASE)
    assert read == replace(BASE, **changes) and type(read.top_k) is int


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1, "0.7", True, math.nan, math.inf, [0.7], 10**400)),
        ("top_k", (-2, 50.5, "50", False, math.nan, math.inf)),
        ("top_p", (-0.1, 1.1, "1")),
        ("min_p", (-0.1, 1.1, {})),
        ("repetition_penalty", (0, 0.0, -1, "1.1")),
        ("do_sample", ("false", 0)),
    ],
)
def test_values_that_make_no_sense_are_named(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{name} must be [^\n]*$"):
            sampling_defaults({name: value}, BASE)


def test_a_share_of_nothing_is_the_likeliest_token() -> None:
    sampler = Sampler(SamplingParams(temperature=2.0, top_k=0, top_p=0.0), 5)
    assert [sampler.distribution(np.array([0.1, 3, 2.9, 3, -1]))[0].tolist() for _ in range(2)] == [[1], [1]]


def test_an_artifact_names_the_file(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(texts={"generation_config.json": json.dumps({"min_p": 2})})
    with pytest.raises(ArtifactError, match=r"generation_config\.json: min_p must be from 0 to 1, not 2; correct"):
        artifact_defaults(open_artifact(folder), BASE)


def test_command_lines_take_what_the_user_says_then_the_model_then_their_own(
    make_artifact: Callable[..., Path],
) -> None:
    config = {"temperature": 0.6, "top_k": -1, "top_p": 0.8, "repetition_penalty": 1.05}
    artifact = open_artifact(make_artifact(texts={"generation_config.json": json.dumps(config)}))
    unset = {key: option.unset for key, option in RUN_OPTIONS.items()}
    made = OptionValues.of(RUN_OPTIONS, {**unset, "top_p": 0.5, "seed": 3}).params(artifact)
    expected = SamplingParams(temperature=0.0, top_k=0, top_p=0.5, min_p=0.0, repetition_penalty=1.05, seed=3)
    assert made == expected
    options = {**RUN_OPTIONS, "temperature": replace(RUN_OPTIONS["temperature"], default=0.8, of_model=True)}
    chat = OptionValues.of(options, {**unset, "temperature": None})
    assert chat.params(artifact) == replace(expected, temperature=0.6, top_p=0.8, seed=None)
    assert chat.params(open_artifact(make_artifact(name="other"))) == SamplingParams()
    with pytest.raises(RequestError, match="top_p"):
        OptionValues.of(RUN_OPTIONS, {**unset, "top_p": 3.0})


def test_fields_that_change_the_text_and_are_not_read() -> None:
    harmless = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "suppress_tokens": [],
        "stop_strings": None,
    }
    assert unread_fields({**harmless, "top_k": 50, "max_length": 4096, "transformers_version": "4.1"}) == []
    told = {"num_beams": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [5], "forced_bos_token_id": 0}
    assert sorted(unread_fields({**harmless, **told})) == sorted(told)
