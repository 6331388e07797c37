"""From a checkpoint, or from any decoder written in PyTorch, to a captured graph."""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.frontend.captured import Captured, ModelFacts
    from picompile.frontend.hf import capture_config, load_model
    from picompile.frontend.module import capture_module

__all__ = ["Captured", "ModelFacts", "capture_config", "capture_module", "load_model"]

# Imported on first use: capturing needs torch and transformers, reading a config.json does not.
_HOME = {
    "Captured": "picompile.frontend.captured",
    "ModelFacts": "picompile.frontend.captured",
    "capture_config": "picompile.frontend.hf",
    "capture_module": "picompile.frontend.module",
    "load_model": "picompile.frontend.hf",
}

__getattr__ = lazy(__name__, _HOME)
