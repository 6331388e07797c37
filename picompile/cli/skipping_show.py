"""Say in a line what limits leave out of an artifact."""

from collections.abc import Mapping
from typing import Any

from picompile.skipping.options import SITES

_WORDS = {"gate": "of neurons by gate", "output": "by gate or output"}


def skipping_text(skipping: Mapping[str, Any]) -> str:
    """Return what a report's `skipping` says in one line, even if it is damaged."""
    try:
        found = {site: _mean_share(skipping["left_out"], site) for site in SITES}
        shares = {site: share for site, share in found.items() if share is not None}
        # Who is left out by its gate counts again among those that are left out by gate or output.
        words = _WORDS if "gate" in shares else {**_WORDS, "output": "of neurons by output"}
        said = ", ".join(f"{share:.0%} {words[site]}" for site, share in shares.items())
        change, tokens = skipping["relative_change"], skipping["tokens"]
        return f"{said}; perplexity {change:+.3%} on {tokens:,} tokens of the calibration text"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "cannot be read"


def _mean_share(left_out: Mapping[str, float], site: str) -> float | None:
    shares = [share for name, share in left_out.items() if name.endswith(f".{site}_limits")]
    return sum(shares) / len(shares) if shares else None
