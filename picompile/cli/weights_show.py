"""Say in a line which formats the matrices of an artifact have, and how they were rounded."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from picompile.quantities import counted_matrices


def weights_text(formats: Mapping[str, Any], rounding: Mapping[str, Any] | None) -> str:
    """Return what a report's `weight_formats` and `rounding` say in one line, even if they are damaged."""
    counts = Counter(map(str, formats.values())).most_common()
    said = [", ".join(f"{count} in {form}" for form, count in counts)]
    # Artifacts of earlier versions do not say how they were rounded.
    if rounding is not None:
        try:
            said += _rounding_texts(rounding, {form for form, _ in counts})
        except (KeyError, TypeError, ValueError):
            said.append("how they were rounded cannot be read")
    return "; ".join(said)


def _rounding_texts(rounding: Mapping[str, Any], formats: set[str]) -> list[str]:
    said = []
    if "bits_per_weight" in rounding:
        bits, loss = rounding["bits_per_weight"], rounding["loss_nats"]
        said.append(f"{bits:.3f} bits a weight, estimated to lose {loss:.5f} nats a token")
    if rounding["method"] == "calibrated":
        said.append(f"rounded for {rounding['tokens']:,} tokens of calibration text at most")
    elif rounding["method"] == "stored":
        # Artifacts of earlier versions do not count those that were rounded.
        rounded = counted_matrices(rounding.get("rounded", {}))
        said.append("as the checkpoint has them" + (f", but for {rounded}" if rounded else ""))
    elif formats != {"f16"}:
        said.append("rounded to the nearest")
    return said
