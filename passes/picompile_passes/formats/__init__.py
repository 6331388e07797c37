"""Weight formats: one file each, and `FORMATS`, which has all of them by name. Importing it imports no torch.

A matrix is stored row by row. A row holds its data, then its zeros or minima and its scales, then nothing up to a
multiple of 64 bytes, so that every row is one aligned, contiguous read. Columns are padded with zeros to a multiple of
32. The zeros of a row are padded to a multiple of 16 bytes. Formats without `rows` are only read in panels of 16 rows
(`panels.py`), so that rows need less padding.

A package offers a format by an entry point of the group `picompile.formats`, which has the format's name and leads to
a `Codec`.
"""

from picompile_passes.formats.codec import (
    BLOCK,
    COARSE_BITS,
    E8M0,
    FLOAT16,
    GROUP,
    HIGH_BLOCK,
    HIGH_GROUPS,
    INT8,
    LOW_BITS,
    PANEL_ROWS,
    ROW_ALIGNMENT_BYTES,
    UINT8,
    ZERO_STEPS,
    Codec,
    Plane,
    ScaleType,
)
from picompile_passes.plugins import Registry, members

__all__ = [
    "BLOCK",
    "CACHE_FORMATS",
    "COARSE_BITS",
    "E8M0",
    "FLOAT16",
    "FORMATS",
    "GROUP",
    "HIGH_BLOCK",
    "HIGH_GROUPS",
    "INT8",
    "LOW_BITS",
    "PANEL_ROWS",
    "ROW_ALIGNMENT_BYTES",
    "UINT8",
    "ZERO_STEPS",
    "Codec",
    "Plane",
    "ScaleType",
    "head_format",
    "predictor_format",
]

# The formats of this folder, those of the most bits first. Other files in it are skipped: most import torch.
_CODECS = [
    value for value in members(__name__, skip=("compiled", "grids", "packing", "panels")) if isinstance(value, Codec)
]
FORMATS = Registry[Codec]("weight format", "picompile.formats", Codec, sorted(_CODECS, key=lambda codec: -codec.bits))

# The formats in which keys and values can be stored as quantized rows.
CACHE_FORMATS = tuple(name for name in FORMATS.builtin if FORMATS[name].cache)


def head_format(format_name: str) -> str:
    """Return the format of the output head and of embeddings in a model whose other matrices are in `format_name`."""
    return FORMATS[format_name].head or format_name


def predictor_format(format_name: str, wanted: str = "auto") -> str:
    """Return the format of predictors' own matrices in a model whose other matrices are in `format_name`.

    It is the one that is `wanted`; for `auto` the format's own choice.
    """
    return (FORMATS[format_name].predictors or format_name) if wanted == "auto" else wanted
