"""q4_1: codes of 4 bits, a scale and a minimum for each group, both float16: the numbers of GGML's Q4_1."""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q4_1",
    4,
    FLOAT16,
    highest=15,
    minimum=FLOAT16,
    panels=True,
    rows=False,
    finer=("q5_1", "q8"),
    ggml=("Q4_1",),
    summary="4 bits, a scale and a minimum for each 32",
)
