"""iq3_xxs: eight magnitudes with their signs, and a scale for each 32 in blocks of 256: GGML's IQ3_XXS.

The magnitudes are those of its grid (`iq3xxs_grid`), which GGML multiplies with a quarter of an odd number.
"""

from picompile_passes.formats.codec import INT8, Codec

_MAGNITUDES = (4, 12, 20, 28, 36, 44, 52, 62)

CODEC = Codec(
    "iq3_xxs",
    4,
    INT8,
    highest=15,
    table=(*(-magnitude for magnitude in reversed(_MAGNITUDES)), *_MAGNITUDES),
    table_step=0.25,
    panels=True,
    rows=False,
    finer=("q4_k", "q5", "q8"),
    ggml=("IQ3_XXS",),
    summary="16 uneven values and a scale for each 32 in blocks of 256",
)
