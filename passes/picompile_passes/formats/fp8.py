"""fp8: the E4M3 numbers of FP8 checkpoints: a sign, four bits of exponent with a bias of 7, three of mantissa.

The codes that stand for no number in OCP's specification are ±480 here, the next ones of the grid. FP8 checkpoints have
a scale for each block of 128 × 128, row or matrix; each group has it, times 256: so those of small weights are normal
numbers of float16.
"""

from picompile_passes.formats.codec import FLOAT16, Codec

_MAGNITUDES = tuple(
    (8 * (code >= 8) + code % 8) * 2.0 ** (max(code // 8, 1) - 10)  # E4M3, 2^(exponent - 7) · (1 + mantissa / 8)
    for code in range(128)
)

CODEC = Codec(
    "fp8",
    8,
    FLOAT16,
    highest=255,
    table=(*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)),
    table_step=2.0**-8,
    panels=True,
    rows=False,
    finer=("f16",),
    summary="8-bit floats (E4M3) and a scale for each 32",
)
