"""`picompile passes`: the list, and `--explain`."""

import dataclasses
import json

from helpers.support import Cli
from picompile_passes.registry import PASSES, make_pass
from picompile_passes.verify import RULES


def explained(cli: Cli, name: str) -> str:
    ended = cli("passes", "--explain", name)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def test_the_list_shows_effects(cli: Cli) -> None:
    out = cli("passes").out
    assert "quantize  predicted → quantized  rounds  from picompile\n" in out
    rows = {row["name"]: row for row in json.loads(cli("passes", "--json").out)}
    assert (rows["quantize"]["effect"], rows["quantize"]["ensures"]) == ("rounds", "quantized")
    assert rows["insert-predictors"]["options"]["ranks"] == "Mapping[int, int]"
    assert set(rows) == set(PASSES) and all(row["summary"] and row["summary"] in out for row in rows.values())


def test_explain_shows_every_fact(cli: Cli) -> None:
    for name, pass_class in PASSES.items():
        found, location = explained(cli, name), f"{pass_class.__module__}:{pass_class.__name__}"
        assert found.startswith(f"{name}  from picompile, {location}\n")
        assert f"effect      {pass_class.default_effect.value}: the logits" in found
        assert f"idempotent  {'yes' if pass_class.idempotent else 'no'}: " in found
        for rule in RULES[pass_class.requires if pass_class.ensures is None else pass_class.ensures]:
            assert f"  {rule.name}  " in found
        options = dataclasses.fields(pass_class)
        assert all(option.metadata["help"] in found for option in options) and (("options" in found) == bool(options))
        facts = json.loads(cli("passes", "--explain", name, "--json").out)
        assert (facts["name"], facts["origin"], facts["location"]) == (name, "picompile", location)
        assert facts["doc"].splitlines()[0] == facts["summary"] and facts["summary"] in found
        assert {"requires", "ensures", "effect", "idempotent"} <= set(facts)
        assert all(rule["says"].endswith(".") for rule in facts["rules"])
        assert [option["name"] for option in facts["options"]] == [option.name for option in options]
        assert isinstance(make_pass(facts["example"]), pass_class)
    # Numbered rules keep their form.
    assert "\n1. Every matrix `w` that an embedding" in explained(cli, "quantize")


def test_an_unknown_pass_is_one_line(cli: Cli) -> None:
    for more in ([], ["--json"]):
        ended = cli("passes", "--explain", "no-such", *more)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("error: there is no pass no-such; there are flatten-tokens, ")
        assert ended.err.count("\n") == 1
