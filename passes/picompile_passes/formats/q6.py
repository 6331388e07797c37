"""q6: codes of 6 bits, and a scale for each group. 32 is the code of 0.

The scale is the weight of largest magnitude, with its sign, divided by -32.

The low four bits of a row lie as those of q4. Behind them come the high two bits, 32 bytes for each 4 groups: byte
(g mod 2) · 16 + i has those of element i of group g at bit 4 · (g div 2), and those of element i + 16 two bits higher.
So 32 bytes of low bits and 32 of high bits make the codes of two groups with one shift and one mask each.
"""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "q6",
    6,
    FLOAT16,
    highest=63,
    zero=32.0,
    panels=True,
    calibrated=True,
    budget=True,
    finer=("q8",),
    summary="6 bits and a scale for each 32",
)
