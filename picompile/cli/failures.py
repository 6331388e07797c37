"""How a command ends: exceptions become one line and an exit code."""

import errno
import os
import sys
import traceback

import typer

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE
NO_SPACE = 5
USAGE = 2
INTERNAL = 1


def report(error: BaseException, *, debug: bool) -> int:
    """Says on stderr what went wrong; returns the exit code. One line, unless `debug` asks for everything."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return BROKEN_PIPE
    code, text = _explain(error)
    if not text:
        return code
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    else:
        text = text.strip().splitlines()[0]
    print(f"error: {text}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and text. Any exception that carries an integer `exit_code` is one that a user can act on."""
    if isinstance(error, typer.Exit):
        return error.exit_code, ""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        # The argument parser's errors keep their text in `format_message`, partly over several lines.
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        return code, " ".join(text.split()) if hasattr(error, "format_message") else text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NO_SPACE, f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    if isinstance(error, OSError) and error.filename is not None:
        # A file that cannot be opened is nearly always one that the user named.
        return USAGE, f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return NO_SPACE, "out of memory; close other programs, or choose a smaller --context"
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    return INTERNAL, f"internal error: {summary}; run with --debug for the traceback"


def _silence_stdout() -> None:
    """Python flushes stdout once more as it ends; with the reader gone that would print an error of its own."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return  # not a real file, as under a test
