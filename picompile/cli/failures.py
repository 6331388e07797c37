"""How a command ends: exceptions become one line and an exit code."""

import errno
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress

import typer

from picompile.cli.streams import silence_stdout
from picompile.errors import PicompileError
from picompile.output import DISK_FULL

SIGNALLED = 128  # plus the signal's number, as shells have it
INTERRUPTED = SIGNALLED + signal.SIGINT
BROKEN_PIPE = SIGNALLED + signal.SIGPIPE
NO_SPACE = 5
USAGE = 2
INTERNAL = 1

_NO_FILES = (errno.EMFILE, errno.ENFILE)
_MOST_CAUSES = 20


def report(error: BaseException, *, debug: bool) -> int:
    """Says on stderr what went wrong; returns the exit code. One line, unless `debug` asks for everything."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # It takes no more, and what is left for it would be tried again at the end.
        silence_stdout()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = "standard output"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    code, text = _explain(error)
    if not text:
        return code
    if not debug:
        text = text.strip().splitlines()[0]
    with suppress(OSError, ValueError):  # stderr takes nothing: the exit code says it
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        print(f"error: {text}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and text. Any exception that carries an integer `exit_code` is one that a user can act on."""
    if isinstance(error, typer.Exit):
        return error.exit_code, ""
    if (limit := _exhausted(error)) is not None:
        return limit
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        # The argument parser's errors keep their text in `format_message`, partly over several lines.
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        return code, " ".join(text.split()) if hasattr(error, "format_message") else text
    if isinstance(error, OSError) and error.filename is not None:
        # A file that cannot be opened is nearly always one that the user named.
        return USAGE, f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return NO_SPACE, "out of memory; close other programs, or choose a smaller --context"
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    return INTERNAL, f"internal error: {summary}; run with --debug for the traceback"


def _exhausted(error: BaseException) -> tuple[int, str] | None:
    """What a file descriptor or a disk was lacking for, where that is why `error` came, whatever was made of it."""
    for cause in _causes(error):
        # Some libraries have no more than the text.
        if getattr(cause, "errno", None) in _NO_FILES or os.strerror(errno.EMFILE) in str(cause):
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return NO_SPACE, f"too many open files: this process may have {most}; raise the limit with ulimit -n"
        if isinstance(cause, OSError) and cause.errno in DISK_FULL and not isinstance(error, PicompileError):
            return NO_SPACE, f"{cause.strerror}: {cause.filename}" if cause.filename else str(cause.strerror)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error itself, and what it was raised from."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
