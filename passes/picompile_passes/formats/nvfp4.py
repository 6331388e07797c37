"""nvfp4: E2M1 numbers, as in mxfp4, and a scale for each 16, float16.

NVFP4 has E4M3 scales, over a number of the whole matrix in folders. Those here are 64 times as large: E4M3's largest
still fits float16, and those of small weights are normal numbers of it.
"""

from picompile_passes.formats.codec import FLOAT16, Codec
from picompile_passes.formats.mxfp4 import CODEC as MXFP4

CODEC = Codec(
    "nvfp4",
    4,
    FLOAT16,
    highest=15,
    table=MXFP4.table,
    table_step=MXFP4.table_step / 64,
    group=16,
    panels=True,
    rows=False,
    finer=("q5", "q8"),
    ggml=("NVFP4",),
    summary="4-bit floats and a scale for each 16",
)
