"""From a checkpoint, or from any decoder written in PyTorch, to a captured graph."""

from picompile.frontend.captured import Captured, ModelFacts
from picompile.frontend.hf import capture_config, load_model
from picompile.frontend.module import capture_module

__all__ = ["Captured", "ModelFacts", "capture_config", "capture_module", "load_model"]
