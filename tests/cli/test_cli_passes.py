"""`picompile passes`: the list, and `--explain`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from helpers.support import Cli
from picompile.cli.pass_source import describe_builtin_passes
from picompile.cli.passes import describe_imported_passes
from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes import BUILTIN
from picompile_passes.registry import find_pass, make_pass
from picompile_passes.verify import RULES


def explained(cli: Cli, name: str) -> str:
    ended = cli("passes", "--explain", name)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def test_the_list_shows_effects(cli: Cli) -> None:
    out = cli("passes").out
    assert "quantize  predicted → quantized  rounds  from picompile\n" in out
    assert "partition  predicted → partitioned  exact  from picompile\n" in out
    effects = {row["name"]: row["effect"] for row in json.loads(cli("passes", "--json").out)}
    assert effects["quantize"] == "rounds"
    assert set(effects) >= set(BUILTIN)


def test_facts_from_the_source_are_those_of_the_classes() -> None:
    ours = [row for row in describe_imported_passes() if row["origin"] == "picompile"]
    assert describe_builtin_passes() == ours


@pytest.mark.parametrize("name", BUILTIN)
def test_explain_shows_every_fact(cli: Cli, name: str) -> None:
    found, pass_class = explained(cli, name), find_pass(name)
    assert found.startswith(f"{name}  from picompile, {BUILTIN[name]}\n")
    assert (pass_class.__doc__ or "").splitlines()[0] in found
    assert f"effect      {pass_class.default_effect.value}: the logits" in found
    assert f"idempotent  {'yes' if pass_class.idempotent else 'no'}: " in found
    for rule in RULES[pass_class.requires if pass_class.ensures is None else pass_class.ensures]:
        assert f"  {rule.name}  " in found
    for option in dataclasses.fields(pass_class):
        assert option.metadata["help"] in found


def test_numbered_rules_keep_their_form(cli: Cli) -> None:
    found = explained(cli, "quantize")
    assert "\n1. Every matrix `w` that an embedding" in found
    assert "\n3. A matrix that is packed already stays as it is.\n" in found
    assert "needs       a graph of stage predicted to quantized\n" in found
    assert "gives       one of stage quantized\n" in found
    assert "options\n  format      str                default q4    weight format: f16, q8, q6, q4m or q4\n" in found
    assert "--pass 'quantize{format=q4,predictors=auto,head=auto,tensors=(lm_head.weight:q8)}'" in found


def test_explain_of_a_pass_without_options_has_no_options(cli: Cli) -> None:
    found = explained(cli, "flatten-tokens")
    assert "options" not in found
    assert "--pass 'flatten-tokens'" in found


def test_every_rule_has_a_description(cli: Cli) -> None:
    rows = json.loads(cli("passes", "--explain", "quantize", "--json").out)["rules"]
    assert [row["name"] for row in rows] == [rule.name for rule in RULES[Stage.QUANTIZED]]
    assert all(row["says"].endswith(".") for row in rows)


@pytest.mark.parametrize("name", BUILTIN)
def test_json_and_its_example(cli: Cli, name: str) -> None:
    found = json.loads(cli("passes", "--explain", name, "--json").out)
    assert (found["name"], found["origin"], found["location"]) == (name, "picompile", BUILTIN[name])
    assert found["doc"].splitlines()[0] == found["summary"]
    assert {"requires", "ensures", "effect", "idempotent", "rules"} <= set(found)
    assert [set(option) for option in found["options"]] == [{"name", "type", "default", "help"}] * len(found["options"])
    assert isinstance(make_pass(found["example"]), find_pass(name))


def test_an_unknown_pass_is_one_line(cli: Cli) -> None:
    for more in ([], ["--json"]):
        ended = cli("passes", "--explain", "no-such", *more)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("error: there is no pass no-such; there are flatten-tokens, ")
        assert ended.err.count("\n") == 1


@dataclass(frozen=True)
class Odd(Pass):
    """Has options of all kinds."""

    name: ClassVar[str] = "odd"
    requires: ClassVar[Stage] = Stage.PREDICTED
    ensures: ClassVar[Stage | None] = None
    default_effect: ClassVar[Effect] = Effect.CHANGES
    idempotent: ClassVar[bool] = False

    share: float
    names: tuple[str, ...] = ("a", "b")
    rows: tuple[int, ...] = ()
    layers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    text: str = ""
    deep: bool = False
    internal: int = field(default=1, init=False)

    def rewrite(self, rewriter: Rewriter) -> None:
        pass


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    from picompile_passes import registry

    entry = registry.Registration("odd", "elsewhere:Odd", "another-package", lambda: Odd)
    known = {**registry.registrations(), "odd": entry}
    monkeypatch.setattr(registry, "registrations", lambda: known)
    # That some package offers passes is looked for first.
    monkeypatch.setattr("picompile.cli.passes.entry_points", lambda group: ["odd"])


@pytest.mark.usefixtures("odd")
def test_a_pass_of_another_package(cli: Cli) -> None:
    found = explained(cli, "odd")
    assert found.startswith("odd  from another-package, elsewhere:Odd\n")
    assert "needs       a graph of stage predicted or later\n" in found
    assert "gives       one of the stage it was given\n" in found
    assert "effect      changes: the logits are those of another model, on purpose\n" in found
    assert "rules that its result is checked by, where that is of stage predicted\n" in found
    rows = [" ".join(line.split()) for line in found.splitlines()]
    assert "share float needed" in rows
    assert "names tuple[str, ...] default (a,b)" in rows
    assert "layers Mapping[int, Sequence[int]] default ()" in rows
    assert "internal" not in found
    assert "odd  predicted → the stage it was given  changes  from another-package\n" in cli("passes").out
    facts = json.loads(cli("passes", "--explain", "odd", "--json").out)
    assert facts["ensures"] is None
    assert [option["default"] for option in facts["options"]] == [None, "(a,b)", "()", "()", "", "false"]
    made = make_pass(facts["example"])
    assert made == Odd(0.5, ("a", "b"), (0, 1), {0: (0, 1)}, "text", deep=False)
