"""q2_k: codes of 2 bits, a scale and a minimum for each 16, whole multiples of those of 256: GGML's Q2_K.

It has the numbers of TQ1_0 and TQ2_0 as well, -1, 0 and 1 times a float16 for each 256: the minimum is that, negated.
"""

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
    ggml=("Q2_K", "TQ1_0", "TQ2_0"),
    summary="2 bits, a scale and a minimum for each 16",
)
