"""From a checkpoint, or from any decoder written in PyTorch, to a captured graph."""

from picompile.capture.captured import Captured
from picompile.capture.facts import ModelFacts
from picompile.capture.hf import capture_config, load_model
from picompile.capture.module import capture_module

__all__ = ["Captured", "ModelFacts", "capture_config", "capture_module", "load_model"]
