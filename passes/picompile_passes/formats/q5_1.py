"""q5_1: codes of 5 bits, a scale and a minimum for each group, both float16: the numbers of GGML's Q5_1."""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q5_1",
    5,
    FLOAT16,
    highest=31,
    minimum=FLOAT16,
    panels=True,
    rows=False,
    finer=("q8",),
    ggml=("Q5_1",),
    summary="5 bits, a scale and a minimum for each 32",
)
