"""Options that a mixture of experts cannot be compiled with are refused here, before anything takes long."""

import os
from pathlib import Path

from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.captured import Captured
from picompile.frontend.facts import has_experts, names_experts, no_accelerator
from picompile.frontend.model_file import read_config


def check_config(model: str | os.PathLike[str] | Captured, options: CompileOptions) -> None:
    """Raise `UnsupportedModelError` where the config.json of a model folder says that it is a mixture and `options` ask
    for an accelerator. Nothing is captured for that.
    """
    if options.back_end is not None and isinstance(model, str | os.PathLike):
        config = read_config(Path(model), options.activation)
        if names_experts(config):
            raise _no_accelerator(Path(model).name, options)


def check_mixture(captured: Captured, options: CompileOptions) -> None:
    """Raise `UnsupportedModelError` for a mixture that `options` ask for what experts do not have."""
    if not has_experts(captured.graph_module):
        return
    if options.back_end is not None:
        raise _no_accelerator(captured.facts.name, options)
    if not options.is_lossless:
        raise UnsupportedModelError(
            f"{captured.facts.name}: predictor {options.kind} of experts is not supported; choose --predictor exact, "
            "which needs neurons that can be silent, or none"
        )


def _no_accelerator(name: str, options: CompileOptions) -> UnsupportedModelError:
    return no_accelerator(name) if options.on_gpu else no_accelerator(name, "leave out --accelerator")
