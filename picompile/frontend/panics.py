"""Panics of the tokenizers package, which it prints before Python sees them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Keep what the tokenizers package prints of its panics from stderr; Python's own output comes after."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
