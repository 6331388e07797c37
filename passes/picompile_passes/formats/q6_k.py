"""q6_k: codes of 6 bits, and a scale for each 16, a whole multiple of that of 256: GGML's Q6_K. 32 is the code of 0."""

from picompile_passes.formats.codec import INT8, Codec

CODEC = Codec(
    "q6_k",
    6,
    INT8,
    highest=63,
    zero=32.0,
    group=16,
    panels=True,
    rows=False,
    finer=("q8",),
    ggml=("Q6_K",),
    summary="6 bits and a scale for each 16 in blocks of 256",
)
