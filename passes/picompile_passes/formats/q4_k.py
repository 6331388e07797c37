"""q4_k: codes of 4 bits, a scale and a minimum for each 32, whole multiples of those of 256: GGML's Q4_K."""

from picompile_passes.formats.codec import INT8, UINT8, Codec

CODEC = Codec(
    "q4_k",
    4,
    INT8,
    highest=15,
    minimum=UINT8,
    panels=True,
    rows=False,
    finer=("q5_k", "q6_k"),
    ggml=("Q4_K",),
    summary="4 bits, a scale and a minimum for each 32 in blocks of 256",
)
