"""f16: float16, without scales.

Values beyond ±65504, which bfloat16 checkpoints can hold, become ±65504 instead of infinity.
"""

from picompile_passes.formats.codec import Codec

CODEC = Codec("f16", 16, summary="float16")
