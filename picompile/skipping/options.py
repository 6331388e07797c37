"""The options of skipping say where a model can skip neurons, and how much text shows what they do."""

from picompile.errors import UsageError

# The places where a model can skip. `gate` leaves out neurons by their activated gate, before up and down are read, and
# `output` by their output, before down is read.
SITES = ("gate", "output")

# Tokens of the text that sensitivities are measured on, at most. Perplexity is measured on others.
SENSITIVITY_TOKENS = 4_096


def check_sites(sites: tuple[str, ...]) -> None:
    """Raise `UsageError` unless `sites` are some of `SITES`, each once."""
    for site in sites:
        if site not in SITES:
            raise UsageError(f"unknown place to skip {site!r}; known are {', '.join(SITES)}")
    if len(set(sites)) < len(sites):
        raise UsageError(f"name each place to skip once: {', '.join(SITES)}")
