"""q4: codes of 4 bits, and a scale for each group. 8 is the code of 0.

Byte i of a group holds element i in its low and element i + 16 in its high four bits. q4 follows GGML's Q4_0 in its
arithmetic (the scale is the weight of largest magnitude, with its sign, divided by -8), not in its layout: GGML
interleaves each scale with its 16 data bytes, which leaves no row aligned.
"""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q4",
    4,
    FLOAT16,
    highest=15,
    zero=8.0,
    panels=True,
    calibrated=True,
    budget=True,
    cache=True,
    spread_cache=True,
    finer=("q4m", "q6"),
    # The file of q4m says why these have 6 bits.
    head="q6",
    predictors="q6",
    ggml=("Q4_0",),
    summary="4 bits and a scale for each 32",
)
