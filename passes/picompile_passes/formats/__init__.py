"""Weight formats: one file each, and `FORMATS`, which has all of them by name. Importing it imports no torch.

A matrix is stored row by row. A row holds its data, then its zeros and its scales, then nothing up to a multiple of 64
bytes, so that every row is one aligned, contiguous read. Columns are padded with zeros to a multiple of 32. The zeros
of a row are padded to a multiple of 16 bytes.

A package offers a format by an entry point of the group `picompile.formats`, which has the format's name and leads to
a `Codec`.
"""

from importlib import import_module
from pkgutil import iter_modules

from picompile_passes.formats.codec import (
    COARSE_BITS,
    E8M0,
    FLOAT16,
    GROUP,
    HIGH_BLOCK,
    LOW_BITS,
    ROW_ALIGNMENT_BYTES,
    ZERO_STEPS,
    Codec,
    ScaleType,
)
from picompile_passes.plugins import Registry

__all__ = [
    "COARSE_BITS",
    "E8M0",
    "FLOAT16",
    "FORMATS",
    "GROUP",
    "HIGH_BLOCK",
    "LOW_BITS",
    "ROW_ALIGNMENT_BYTES",
    "ZERO_STEPS",
    "Codec",
    "ScaleType",
    "head_format",
    "predictor_format",
]

# Modules of this folder that are no format.
_COMMON = ("codec", "packing")


def _builtin() -> tuple[Codec, ...]:
    """Return the formats of this folder, those of the most bits first."""
    names = [module.name for module in iter_modules(__path__) if module.name not in _COMMON]
    codecs = [import_module(f"{__name__}.{name}").CODEC for name in names]
    return tuple(sorted(codecs, key=lambda codec: -codec.bits))


FORMATS: Registry[Codec] = Registry("weight format", "picompile.formats", Codec, _builtin())


def head_format(format_name: str) -> str:
    """Return the format of the output head and of embeddings in a model whose other matrices are in `format_name`."""
    return FORMATS[format_name].head or format_name


def predictor_format(format_name: str, wanted: str = "auto") -> str:
    """Return the format of predictors' own matrices in a model whose other matrices are in `format_name`.

    It is the one that is `wanted`; for `auto` the format's own choice.
    """
    return (FORMATS[format_name].predictors or format_name) if wanted == "auto" else wanted
