"""q5_k: codes of 5 bits, a scale and a minimum for each 32, whole multiples of those of 256: GGML's Q5_K."""

from picompile_passes.formats.codec import INT8, UINT8, Codec

CODEC = Codec(
    "q5_k",
    5,
    INT8,
    highest=31,
    minimum=UINT8,
    panels=True,
    rows=False,
    finer=("q6_k", "q8"),
    ggml=("Q5_K",),
    summary="5 bits, a scale and a minimum for each 32 in blocks of 256",
)
