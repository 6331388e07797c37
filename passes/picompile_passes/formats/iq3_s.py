"""iq3_s: odd numbers up to 15 and their negatives, and a scale for each 32 in blocks of 256: GGML's IQ3_S."""

from picompile_passes.formats.codec import INT8, Codec

CODEC = Codec(
    "iq3_s",
    4,
    INT8,
    highest=15,
    table=tuple(range(-15, 16, 2)),
    panels=True,
    rows=False,
    finer=("q4_k", "q5", "q8"),
    ggml=("IQ3_S",),
    summary="16 odd values and a scale for each 32 in blocks of 256",
)
