"""iq4_nl: codes of 4 bits for 16 unevenly spaced values, and a scale for each 32: GGML's IQ4_NL."""

from picompile_passes.formats.codec import FLOAT16, Codec

# GGML's `kvalues_iq4nl`.
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

CODEC = Codec(
    "iq4_nl",
    4,
    FLOAT16,
    highest=15,
    table=VALUES,
    panels=True,
    rows=False,
    finer=("q5", "q8"),
    ggml=("IQ4_NL",),
    summary="16 uneven values and a scale for each 32",
)
