"""Models that transformers does not have, written out here so that no code of a checkpoint is ever run."""

from picompile.models.bamboo import BambooConfig, BambooForCausalLM
from picompile.models.fatrelu import FatReLU

__all__ = ["BambooConfig", "BambooForCausalLM", "FatReLU"]
