"""The error for PTX that the translator has no rule for."""


class PtxError(Exception):
    """PTX that the translator does not know, or that breaks a rule. The message has the line."""
