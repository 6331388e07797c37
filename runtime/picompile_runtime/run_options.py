"""The options of `picompile run` and `picompile-run`, declared once for both command lines, and argparse's part.

Defaults are those of `SamplingParams`, which a test holds: importing it here would import numpy for every `--help`.
"""

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RunOption:
    """One option.

    `names` are its spellings, the short one first. `default` None means that the option has none of its own; its type
    then is `kind`. `least` and `most` bound a number, both included. `repeated` options may be given several times. An
    option `of_model` that is not given has no value: what the model's generation_config.json says counts, and `default`
    if that says nothing. A command with many options shows those that are `common` in its short help.
    """

    names: tuple[str, ...]
    kind: type[int] | type[float] | type[str] | type[bool]
    help: str
    default: int | float | bool | str | None = None
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    repeated: bool = False
    of_model: bool = False
    common: bool = False

    @property
    def unset(self) -> int | float | bool | str | None:
        """The value of an option that is not given."""
        return None if self.of_model else self.default

    @property
    def text(self) -> str:
        """The help, with the default if that depends on the model."""
        return f"{self.help} Default: the model's own, else {self.default}." if self.of_model else self.help

    @property
    def key(self) -> str:
        """The name under which a program finds the value: the long spelling with underscores."""
        return self.names[-1].removeprefix("--").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser, bounded: bool = False) -> None:
        """Declare the option in a parser of argparse, which checks the bounds if it is `bounded`."""
        text = self.text.replace("%", "%%")
        if self.kind is bool:
            parser.add_argument(*self.names, action="store_true", help=text)
            return
        parser.add_argument(
            *self.names,
            dest=self.key,
            action="append" if self.repeated else "store",
            type=self._read if bounded and self.least is not None else self.kind,
            default=[] if self.repeated else self.unset,
            metavar=self.metavar,
            help=text if self.unset is None else f"{text} [default: {self.unset}]",
        )

    def _read(self, text: str) -> float:
        """Return an option's number. Raises ArgumentTypeError if it is none, or out of bounds."""
        least, most = (-math.inf if self.least is None else self.least, math.inf if self.most is None else self.most)
        try:
            number = self.kind(text)
        except ValueError:
            number = math.nan
        if not isinstance(number, int | float) or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {text[:80]!r}")
        return number


# The options that `SamplingParams` takes, by the names that it has for them.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")

RUN_OPTIONS = {
    option.key: option
    for option in (
        RunOption(
            ("-n", "--max-tokens"),
            kind=int,
            help="Tokens to generate, at most.",
            default=128,
            metavar="N",
            least=1,
            common=True,
        ),
        RunOption(
            ("--temp", "--temperature"),
            kind=float,
            help="Temperature: 0 takes the likeliest token, above 0 draws one.",
            default=0.0,
            metavar="X",
            least=0,
            common=True,
        ),
        RunOption(
            ("--top-k",),
            kind=int,
            help="Draw from the N likeliest tokens; 0 or -1 draws from all.",
            default=40,
            metavar="N",
            least=-1,
            of_model=True,
        ),
        RunOption(
            ("--top-p",),
            kind=float,
            help="Draw from the likeliest tokens whose probabilities reach X together.",
            default=0.95,
            metavar="X",
            least=0,
            most=1,
            of_model=True,
        ),
        RunOption(
            ("--min-p",),
            kind=float,
            help="Draw from tokens at least X times as likely as the likeliest.",
            default=0.0,
            metavar="X",
            least=0,
            most=1,
            of_model=True,
        ),
        RunOption(
            ("--repetition-penalty",),
            kind=float,
            help="Above 1 makes tokens that have occurred less likely.",
            default=1.0,
            metavar="X",
            least=0,
            of_model=True,
        ),
        RunOption(
            ("--seed",),
            kind=int,
            help="Seed that makes drawing repeatable. Default: a new one every time.",
            default=None,
            metavar="N",
            least=0,
            common=True,
        ),
        RunOption(
            ("--draft",),
            kind=str,
            help="Speculative decoding: ngram drafts what followed the same tokens before, and checks several tokens "
            "in one step; none drafts nothing. The text is the same.",
            default="ngram",
            metavar="KIND",
        ),
        RunOption(
            ("-t", "--threads"),
            kind=int,
            help="CPU threads. Default: one for each physical core.",
            default=None,
            metavar="N",
            least=1,
            most=256,
            common=True,
        ),
        RunOption(
            ("--replan",),
            bool,
            "If the GPU has less free memory than the plan needs, leave weights in host memory, where the GPU reads "
            "them over the bus, instead of ending.",
            False,
        ),
        RunOption(
            ("--stop",), kind=str, help="End before this text; repeatable.", default=None, metavar="TEXT", repeated=True
        ),
        RunOption(("--json",), bool, "Print one JSON object instead of text.", False, common=True),
        RunOption(("--debug",), bool, "Print the traceback of an error.", False),
    )
}
