import sys
from importlib.metadata import EntryPoint

import pytest

from helpers.installed import install
from picompile_passes import plugins
from picompile_passes.errors import PassOptionError, RegistryError
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.registry import PASSES, find_pass, make_pass

GROUP = "picompile.passes"
PLUGIN = """
from dataclasses import dataclass
from picompile_passes.base import Pass, Stage

@dataclass(frozen=True)
class Shrink(Pass):
    name = "shrink"
    requires = ensures = Stage.CANONICAL
    layers: tuple[int, ...] = ()

    def rewrite(self, rewriter):
        pass

class NotADataclass(Pass):
    name = "not-a-dataclass"
    requires = ensures = Stage.CANONICAL

    def rewrite(self, rewriter):
        pass

@dataclass(frozen=True)
class Abstract(Pass):
    name = "abstract"

something = 3
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(PASSES, "_known", dict(PASSES._known))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield lambda *points: install(tmp_path / "site", "shrinking", PLUGIN, GROUP, points)
    sys.modules.pop("shrinking", None)


def test_every_pass_is_found_under_its_own_name():
    assert {pass_.name for pass_ in CANONICALIZE} < set(PASSES)
    for name in PASSES:
        pass_class = find_pass(name)
        assert pass_class.name == name
        assert pass_class.ensures is None or pass_class.requires <= pass_class.ensures
        assert make_pass(name) == pass_class()
        assert PASSES.origin(name) == "picompile"


def test_options_reach_the_pass():
    assert make_pass("quantize{format=q8}") == Quantize("q8")
    assert make_pass("partition{hot=(0:(17,5),2:())}") == Partition({2: (), 0: (5, 17)})
    for text, message in [
        ("quantize{format=q9}", "'q9' is not one of f16, .*q8, .*, q4,"),
        ("partition{hot=(1,2)}", "option hot of pass partition: '1' is not written key:value"),
        ("quantise", "there is no pass quantise; there are .*quantize"),
    ]:
        with pytest.raises(PassOptionError, match=message):
            make_pass(text)


def test_an_installed_package_offers_passes(plugin):
    plugin("shrink = shrinking:Shrink")
    assert PASSES.origin("shrink") == "shrinking"
    assert "shrinking" not in sys.modules
    assert make_pass("shrink{layers=(1,2)}").layers == (1, 2)


def test_a_name_of_ours_cannot_be_taken(plugin):
    plugin("quantize = shrinking:Shrink")
    text = "^two passes are called quantize: one from picompile and shrinking:Shrink from shrinking$"
    with pytest.raises(RegistryError, match=text):
        make_pass("insert-predictors")


def test_a_name_given_twice_by_packages_is_an_error(monkeypatch):
    points = [EntryPoint("shrink", f"{module}:Shrink", GROUP) for module in ("one", "other")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    with pytest.raises(RegistryError, match=r"two passes are called shrink: one:Shrink .* and other:Shrink"):
        list(PASSES)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("gone = shrinking:Gone", "pass gone from shrinking does not import: .*Gone"),
        ("gone = no_such_module_here:Gone", "pass gone from shrinking does not import: No module named"),
        ("something = shrinking:something", "something from shrinking is not a subclass of Pass"),
        ("not-a-dataclass = shrinking:NotADataclass", "NotADataclass from shrinking is not a dataclass"),
        ("abstract = shrinking:Abstract", "Abstract from shrinking is not a dataclass with a rewrite method"),
        ("smaller = shrinking:Shrink", "is registered as smaller but calls itself shrink"),
    ],
)
def test_a_registration_that_is_no_pass_is_refused(plugin, point, message):
    plugin(point)
    with pytest.raises(RegistryError, match=message):
        find_pass(point.split(" ")[0])
