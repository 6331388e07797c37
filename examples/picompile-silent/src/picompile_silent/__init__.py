"""Two passes for picompile: `count-weight-bytes`, which annotates, and `drop-silent-neurons`, which rewrites."""

from picompile_silent.count_weight_bytes import CountWeightBytes
from picompile_silent.drop_silent_neurons import DropSilentNeurons

__all__ = ["CountWeightBytes", "DropSilentNeurons"]
