"""mxfp4: the numbers of 4 bits and the scales of the OCP Microscaling Formats (MX) Specification v1.0.

A code is an E2M1 number: a sign, two bits of exponent, one of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
The scale of a group is a power of two, a byte (E8M0). In halves, E2M1 numbers are integers of at most 12.

The specification's scale is 2^(floor(log2 of the largest magnitude) - 2), with which a group's largest weight may be
up to 8 and is cut off at 6. `grids.py` takes it, or twice it where that makes the sum of squared errors smaller.
Codes lie as those of q4.
"""

from picompile_passes.formats.codec import E8M0, Codec

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)

CODEC = Codec(
    "mxfp4",
    4,
    E8M0,
    highest=15,
    table=(*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)),
    table_step=0.5,
    panels=True,
    calibrated=True,
    finer=("q4", "q6"),
    # The file of q4m says why these have 6 bits.
    head="q6",
    predictors="q6",
    ggml=("MXFP4",),
    summary="4-bit floats and a power of two for each 32",
)
