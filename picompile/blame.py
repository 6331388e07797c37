"""Which layers are to blame for what predictors cost."""

from collections.abc import Mapping

# Blame falls on the layers that make this share of the missed energy.
_BLAMED_SHARE = 0.8


def to_blame(missed: Mapping[int, float]) -> list[int]:
    """The layers that miss most of what all miss together, the worst first; none that misses nothing.

    `missed` is each layer's missed energy, as `picompile.gate` measures it.
    """
    whole, seen, found = sum(missed.values()), 0.0, []
    for layer, energy in sorted(missed.items(), key=lambda entry: (-entry[1], entry[0])):
        if energy <= 0 or seen >= _BLAMED_SHARE * whole:
            break
        found.append(layer)
        seen += energy
    return found
