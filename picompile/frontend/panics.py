"""Failures of the tokenizers package: its panics are printed before Python sees them, and are no `Exception`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from picompile.frontend.messages import one_line, printable


class CannotBuildError(Exception):
    """A tokenizer that cannot be built, or that fails on a text; the message is one line."""


@contextmanager
def guarded() -> Iterator[None]:
    """Raise whatever the tokenizers package raises, panics among them, as `CannotBuildError`."""
    try:
        with quiet_panics():
            yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        known = error if isinstance(error, Exception) and str(error) else Exception(str(error) or type(error).__name__)
        raise CannotBuildError(printable(one_line(known))) from error


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
