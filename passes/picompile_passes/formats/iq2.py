"""iq2: three magnitudes with their signs, and a scale for each 16 in blocks of 256: GGML's IQ2_XXS, IQ2_XS and IQ2_S.

The magnitudes are those of its grids (`iq2xs_grid`), which GGML multiplies with an eighth of an odd number. IQ2_XXS has
a scale for each 32, so that two groups of 16 have the same. Codes that GGML has no use for stand for 0.
"""

from picompile_passes.formats.codec import INT8, Codec

CODEC = Codec(
    "iq2",
    4,
    INT8,
    highest=15,
    table=(-43, -25, -8, 8, 25, 43, *[0] * 10),
    table_step=0.125,
    group=16,
    panels=True,
    rows=False,
    finer=("q4_k", "q5", "q8"),
    ggml=("IQ2_XXS", "IQ2_XS", "IQ2_S"),
    summary="6 uneven values and a scale for each 16 in blocks of 256",
)
