"""From captured to canonical: the passes that raise a graph to the dialect, in order."""

from picompile_passes.infra import Pass
from picompile_passes.passes.flatten_tokens import FlattenTokens
from picompile_passes.passes.raise_attention import RaiseAttention
from picompile_passes.passes.raise_ffn import RaiseFFN
from picompile_passes.passes.raise_linear import RaiseLinear
from picompile_passes.passes.raise_norms import RaiseNorms
from picompile_passes.passes.raise_rotary import RaiseRotary
from picompile_passes.passes.remove_copies import RemoveCopies

CANONICALIZE: tuple[Pass, ...] = (
    RemoveCopies(),
    RaiseLinear(),
    RaiseNorms(),
    RaiseAttention(),
    RaiseRotary(),
    RaiseFFN(),
    FlattenTokens(),
)
