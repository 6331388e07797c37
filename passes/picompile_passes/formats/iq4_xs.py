"""iq4_xs: the values of iq4_nl, and a scale for each 32, a whole multiple of that of 256: GGML's IQ4_XS."""

from picompile_passes.formats.codec import INT8, Codec
from picompile_passes.formats.iq4_nl import VALUES

CODEC = Codec(
    "iq4_xs",
    4,
    INT8,
    highest=15,
    table=VALUES,
    panels=True,
    rows=False,
    finer=("iq4_nl", "q5", "q8"),
    ggml=("IQ4_XS",),
    summary="16 uneven values and a scale for each 32 in blocks of 256",
)
