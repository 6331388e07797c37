"""Options that a mixture of experts cannot be compiled with are refused here, before anything takes long."""

import os
from pathlib import Path

from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.captured import Captured
from picompile.frontend.facts import expert_blocks, names_experts, no_accelerator
from picompile.frontend.model_file import read_config
from picompile.predictors.profile.collect import check_experts_fire


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
    blocks = expert_blocks(captured.graph_module)
    if not blocks:
        return
    if options.back_end is not None:
        raise _no_accelerator(captured.facts.name, options)
    if not options.is_lossless:
        check_experts_fire(captured.facts.name, blocks)


def _no_accelerator(name: str, options: CompileOptions) -> UnsupportedModelError:
    return no_accelerator(name) if options.on_gpu else no_accelerator(name, "leave out --accelerator")
