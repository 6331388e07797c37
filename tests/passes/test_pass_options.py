from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass

import pytest

from picompile_passes.errors import PassOptionError
from picompile_passes.registry import construct, split_pass


@dataclass(frozen=True)
class Options:
    word: str = "a"
    count: int = 1
    share: float = 0.5
    flag: bool = False
    layers: tuple[int, ...] = ()
    names: tuple[str, ...] = ("x",)
    bare: tuple = ()
    table: dict[int, int] = field(default_factory=dict)
    hot: Mapping[int, Sequence[int]] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    pair: tuple[int, int] = (0, 0)
    long_name: int = 0


def read(text):
    name, options = split_pass(text)
    return construct(name, Options, options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p", Options()),
        ("p{}", Options()),
        (" p{word=b} ", Options(word="b")),
        ("p{word=fatrelu(0.1,2),count=-3}", Options(word="fatrelu(0.1,2)", count=-3)),
        ("p{word='a,b=}',count=2}", Options(word="a,b=}", count=2)),
        ('p{word="(("}', Options(word="((")),
        ("p{word=a=b}", Options(word="a=b")),
        ("p{word=}", Options(word="")),
        ("p{share=1e-3, flag=true}", Options(share=1e-3, flag=True)),
        ("p{flag=False}", Options(flag=False)),
        ("p{layers=(1, 2,3)}", Options(layers=(1, 2, 3))),
        ("p{layers=()}", Options(layers=())),
        ("p{names=(a,'b,c')}", Options(names=("a", "b,c"))),
        ("p{bare=(a,b)}", Options(bare=("a", "b"))),
        ("p{table=(1:2, 3 : 4)}", Options(table={1: 2, 3: 4})),
        ("p{hot=(0:(5,17),2:())}", Options(hot={0: (5, 17), 2: ()})),
        ("p{hot=()}", Options(hot={})),
        ("p{long-name=4}", Options(long_name=4)),
        ("p{long_name=4}", Options(long_name=4)),
    ],
)
def test_options_are_read_by_the_types_of_the_fields(text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a pass is written name or name{option=value,...}, not ''"),
        ("p{count=1", "a pass is written name or name{option=value,...}, not 'p{count=1'"),
        ("p q", "a pass is written name or name{option=value,...}, not 'p q'"),
        ("p{count}", "an option is written name=value, not 'count', in 'p{count}'"),
        ("p{=1}", "an option is written name=value, not '=1', in 'p{=1}'"),
        ("p{count=1,}", "an option is written name=value, not '', in 'p{count=1,}'"),
        ("p{count=1,count=2}", "option count is given twice in 'p{count=1,count=2}'"),
        ("p{layers=(1}", "a parenthesis is not closed in 'layers=(1'"),
        ("p{word='a}", 'a quote is not closed in "word=\'a"'),
        ("p{weight=1}", "pass p has no option weight; its options: bare, count, flag, hot, layers, long_name, "),
        ("p{count=1.5}", "option count of pass p: '1.5' is not a whole number"),
        ("p{share=half}", "option share of pass p: 'half' is not a number"),
        ("p{flag=yes}", "option flag of pass p: 'yes' is neither true nor false"),
        ("p{layers=1}", "option layers of pass p: '1' is not a list in parentheses"),
        ("p{layers=(1,x)}", "option layers of pass p: 'x' is not a whole number"),
        ("p{table=1}", "option table of pass p: '1' is not a list of key:value in parentheses"),
        ("p{table=(1)}", "option table of pass p: '1' is not written key:value"),
        ("p{table=(1:2,x:3)}", "option table of pass p: 'x' is not a whole number"),
        ("p{table=(1:2,1:3)}", "option table of pass p: 1 is given twice"),
        ("p{nodes=1}", "option nodes of pass p: it cannot be given as text, only in Python"),
        ("p{pair=(1,2)}", "option pair of pass p: it cannot be given as text, only in Python"),
    ],
)
def test_unreadable_options_are_refused_with_the_reason(text, message):
    with pytest.raises(PassOptionError) as error:
        read(text)
    assert str(error.value).startswith(message)


def test_an_option_that_must_be_given():
    needy = make_dataclass("Needy", [("needed", int)])
    assert construct("p", needy, {"needed": "3"}) == needy(3)
    with pytest.raises(PassOptionError, match=r"^pass p needs the option needed: p\{needed=\.\.\.\}$"):
        construct("p", needy, {})
