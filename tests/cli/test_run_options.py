"""`picompile run` and `picompile-run` have the same options, and those of the sampler have its defaults."""

import inspect
from dataclasses import fields

from picompile.cli.run import run_command
from picompile_runtime.__main__ import _parser
from picompile_runtime.run_options import RUN_OPTIONS
from picompile_runtime.sampling.sampler import SamplingParams

# OpenAI's API has them.
ONLY_SERVED = {"presence_penalty", "frequency_penalty", "logit_bias"}


def test_defaults_are_those_of_the_sampler() -> None:
    declared = {("temperature" if key == "temp" else key): option.default for key, option in RUN_OPTIONS.items()}
    # Command lines take the likeliest token unless they are told to draw.
    sampler = SamplingParams(temperature=0.0)
    names = {field.name for field in fields(sampler)} - ONLY_SERVED
    assert {name: getattr(sampler, name) for name in names} == {name: declared[name] for name in names}


def test_both_command_lines_take_every_option() -> None:
    parsed = vars(_parser().parse_args(["artifact", "-p", "text"]))
    command = {name.replace("json_output", "json") for name in inspect.signature(run_command).parameters}
    for key, option in RUN_OPTIONS.items():
        assert parsed[key] == ([] if option.repeated else option.default)
        assert ("temperature" if key == "temp" else key) in command
