"""Which record describes the model of a GGUF file."""

from picompile.frontend.gguf.architecture import Architecture
from picompile.frontend.gguf.architectures import ARCHITECTURES
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import read_text
from picompile.frontend.gguf.mixtures import MIXTURES

RECORDED = frozenset({*ARCHITECTURES, *MIXTURES})
"""The architectures that have a record."""

# Bamboo's files come from the same converter as Llama's.
_SAME = {"bamboo": "llama"}


def find_record(header: GgufHeader) -> Architecture | None:
    """Return the record of the model in a file; None for one that has none, which transformers' tables may have.

    A mixture of experts and another model may have one name of an architecture.
    """
    architecture = read_text(header, "general.architecture") or ""
    own = _SAME.get(architecture, architecture)
    return MIXTURES.get(own) if is_mixture(header) else ARCHITECTURES.get(own)


def is_mixture(header: GgufHeader) -> bool:
    """Return whether a file says that its model has experts."""
    architecture = read_text(header, "general.architecture") or ""
    return bool(header.values.get(f"{architecture}.expert_count"))
