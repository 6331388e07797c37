"""q3_k: codes of 3 bits, and a scale for each 16, a whole multiple of that of 256: GGML's Q3_K. 4 is the code of 0."""

from picompile_passes.formats.codec import INT8, Codec

CODEC = Codec(
    "q3_k",
    3,
    INT8,
    highest=7,
    zero=4.0,
    group=16,
    panels=True,
    rows=False,
    finer=("q4_k",),
    ggml=("Q3_K",),
    summary="3 bits and a scale for each 16",
)
