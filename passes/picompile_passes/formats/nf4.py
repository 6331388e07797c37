"""nf4: the numbers of bitsandbytes' NF4, quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E).

bitsandbytes has a scale for each 64 weights, float32 or, with double quantization, the sum of a mean and a product.
"""

from picompile_passes.formats.codec import FLOAT16, Codec

CODEC = Codec(
    "nf4",
    4,
    FLOAT16,
    highest=15,
    table=(
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    panels=True,
    rows=False,
    finer=("q5", "q8"),
    summary="4-bit quantiles and a scale for each 32",
)
