"""The options of artifacts that the library makes; `compile` has many more."""

import os
from dataclasses import dataclass, fields

from picompile.choices import CONTEXT
from picompile.config import CompileOptions
from picompile.machine.targets import find_native_target
from picompile.options import check_options, documented, option, options_of

# Enough for a small server. A sequence that is not used takes no memory, and no time.
SEQUENCES = 4

_COMPILE = {each.name: declared for each, declared in options_of(CompileOptions)}


@documented
@dataclass(frozen=True)
class LibraryOptions:
    """The options of `chat`, `run`, `serve` and others for a MODEL that they compile."""

    context: int | None = CONTEXT.field(None)
    quant: str | None = option(
        None,
        "Weight format of a MODEL that is compiled for this: 4bit, q8, f16, a budget such as 5.2bpw, or another of "
        "compile. Default: the numbers of a quantized model, else 4bit.",
        metavar="FORMAT",
        check=_COMPILE["quant"].check,
    )

    def __post_init__(self) -> None:
        """Raise `UsageError` for values that no model has."""
        check_options(self)

    @property
    def given(self) -> list[str]:
        """The options that the user gave, with their values, as the command line spells them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return [f"--{name} {value}" for name, value in values.items() if value is not None]

    def compile_options(self) -> CompileOptions:
        """Return the options to compile with: for this machine's processor, unless PICOMPILE_TARGET names another.

        Raises:
            UsageError: the variable names no target.
        """
        target = os.environ.get(str(_COMPILE["target"].env)) or ("native" if find_native_target() else "cpu")
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return CompileOptions(target=target, sequences=SEQUENCES, overwrite=True, **own)
