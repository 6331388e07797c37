"""Words for the speed of generated text, as a reader feels it."""

# Tokens/s: faster than people read, and about as fast as they read aloud.
FAST, USABLE = 10.0, 3.0


def speed_word(tokens_per_s: float) -> str:
    """Return fast, usable or slow."""
    return "fast" if tokens_per_s >= FAST else "usable" if tokens_per_s >= USABLE else "slow"
