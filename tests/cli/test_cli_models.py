"""`picompile models`: what is known to work, and what is refused."""

import json

from helpers.support import Cli


def test_lists(cli: Cli) -> None:
    shown, refused = (cli("models", *more) for more in ((), ("--refused",)))
    assert (shown.code, refused.code, shown.err, refused.err) == (0, 0, "", "")
    assert "\nLlamaForCausalLM" in shown.out and "MixtralForCausalLM" not in shown.out
    assert "\nLlamaForCausalLM" not in refused.out and "mixtures of experts are not supported" in refused.out


def test_json(cli: Cli) -> None:
    every, refused, named = (
        json.loads(cli("models", *more, "--json").out) for more in ((), ("--refused",), ("mamba",))
    )
    assert {entry["result"] for entry in every} == {"ok", "refused", "untried"}
    assert refused == [entry for entry in every if entry["result"] != "ok"]
    assert {"mamba", "falcon_mamba"} <= {entry["model_type"] for entry in named}


def test_an_unknown_name(cli: Cli) -> None:
    ended = cli("models", "gpt-9")
    assert (ended.code, ended.out) == (2, "") and "of a class or type with 'gpt-9' in it" in ended.err
