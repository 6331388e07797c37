"""q4m: q4 with a zero of its own in each group, in sixteenths of a step.

Its codes span what the group's weights do, where those of q4 reach as far below 0 as above. The scale is that span,
which includes 0, divided by 15.
"""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q4m",
    4,
    FLOAT16,
    highest=15,
    zero=None,
    panels=True,
    calibrated=True,
    budget=True,
    finer=("q6",),
    # Rounding the head to 4 bits costs more perplexity than all other matrices together, and errors of 4 bits in a
    # predictor move scores across its threshold.
    head="q6",
    predictors="q6",
    summary="4 bits, a scale and a zero for each 32",
)
