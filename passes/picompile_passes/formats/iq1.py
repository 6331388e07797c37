"""iq1: an eighth more or less than -1, 0 and 1, and a scale for each 16 in blocks of 256: GGML's IQ1_S and IQ1_M.

IQ1_S has a scale for each 32, so that two groups of 16 have the same. Codes that GGML has no use for stand for 0.
"""

from picompile_passes.formats.codec import INT8, Codec

CODEC = Codec(
    "iq1",
    4,
    INT8,
    highest=15,
    table=(-9, -7, -1, 1, 7, 9, *[0] * 10),
    table_step=0.125,
    group=16,
    panels=True,
    rows=False,
    finer=("q4_k", "q5", "q8"),
    ggml=("IQ1_S", "IQ1_M"),
    summary="6 uneven values and a scale for each 16 in blocks of 256",
)
