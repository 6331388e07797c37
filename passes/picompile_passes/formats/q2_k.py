"""q2_k: codes of 2 bits, a scale and a minimum for each 16, whole multiples of those of 256: GGML's Q2_K."""

from picompile_passes.formats.codec import INT8, UINT8, Codec

CODEC = Codec(
    "q2_k",
    2,
    INT8,
    highest=3,
    minimum=UINT8,
    group=16,
    panels=True,
    rows=False,
    finer=("q3_k", "q4_k"),
    ggml="Q2_K",
    summary="2 bits, a scale and a minimum for each 16",
)
