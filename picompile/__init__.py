"""picompile: a compiler for language models whose feed-forward neurons fire sparsely.

    from pathlib import Path

    import picompile

    picompile.compile_model(Path("models/tiny-reglu"), Path("build/tiny-reglu"), picompile.CompileOptions(quant="q8"))
    engine = picompile.load("build/tiny-reglu")

Names are resolved on first use, so importing this package imports neither torch nor a compiler.
"""

import importlib
from typing import TYPE_CHECKING, Any

from picompile.errors import (
    AccuracyError,
    DoesNotFitError,
    PicompileError,
    SolverError,
    TargetError,
    UnsupportedModelError,
    UsageError,
)
from picompile_runtime.version import __version__

if TYPE_CHECKING:
    from picompile.compile import compile_model
    from picompile.config import CompileOptions
    from picompile.frontend.captured import Captured
    from picompile.frontend.hf import load_model
    from picompile.frontend.module import capture_module
    from picompile_runtime import Engine, load, verify

__all__ = [
    "AccuracyError",
    "Captured",
    "CompileOptions",
    "DoesNotFitError",
    "Engine",
    "PicompileError",
    "SolverError",
    "TargetError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "capture_module",
    "compile_model",
    "load",
    "load_model",
    "verify",
]

_HOME = {
    "Captured": "picompile.frontend.captured",
    "CompileOptions": "picompile.config",
    "Engine": "picompile_runtime",
    "capture_module": "picompile.frontend.module",
    "compile_model": "picompile.compile",
    "load": "picompile_runtime",
    "load_model": "picompile.frontend.hf",
    "verify": "picompile_runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
