"""q5: codes of 5 bits, and a scale for each group; 16 is the code of 0. The numbers of GGML's Q5_0."""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q5",
    5,
    FLOAT16,
    highest=31,
    zero=16.0,
    panels=True,
    rows=False,
    finer=("q6", "q8"),
    ggml=("Q5_0",),
    summary="5 bits and a scale for each 32",
)
