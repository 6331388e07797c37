"""q8: codes of 8 bits with a sign, and a scale for each group.

The scale is the group's largest magnitude / 127, so that codes are from -127 on. Checkpoints may have -128 too.
"""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q8",
    8,
    FLOAT16,
    lowest=-127,
    highest=127,
    panels=True,
    budget=True,
    cache=True,
    finer=("f16",),
    ggml=("Q8_0",),
    summary="8 bits and a scale for each 32",
)
