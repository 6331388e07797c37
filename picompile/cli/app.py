"""The application: its commands, and the one place where exceptions become one line and an exit code."""

import errno
import os
import platform
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Annotated

import typer
from typer.main import get_command

from picompile.cli.bench import bench_command
from picompile.cli.chat import chat_command
from picompile.cli.compile import compile_command
from picompile.cli.diff import diff_command
from picompile.cli.doctor import doctor_command
from picompile.cli.eval import eval_command
from picompile.cli.help import ShortHelpCommand
from picompile.cli.import_predictors import import_predictors_command
from picompile.cli.inspect import inspect_command
from picompile.cli.library import list_command, pull_command, rm_command
from picompile.cli.models import models_command
from picompile.cli.options import takes_options
from picompile.cli.passes import passes_command
from picompile.cli.plan import plan_command
from picompile.cli.profile import profile_command
from picompile.cli.report import report_command
from picompile.cli.run import run_command
from picompile.cli.serve import serve_command
from picompile.cli.synth import synth_command
from picompile.cli.targets import targets_command
from picompile.cli.train import train_command
from picompile.cli.verify import verify_command
from picompile.errors import PicompileError
from picompile.output import DISK_FULL
from picompile_runtime.version import __version__

SIGNALLED = 128  # plus the signal's number, as shells have it
INTERRUPTED = SIGNALLED + signal.SIGINT
BROKEN_PIPE = SIGNALLED + signal.SIGPIPE
NO_SPACE = 5
USAGE = 2
INTERNAL = 1

_NO_FILES = (errno.EMFILE, errno.ENFILE)
_MOST_CAUSES = 20


def report(error: BaseException, *, debug: bool) -> int:
    """Print on stderr what went wrong and return the exit code. It is one line unless `debug` asks for everything."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # It accepts no more, and Python would try to write the rest again at the end.
        silence_stdout()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = "standard output"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, SystemExit):
        # rich, which prints tables and helps, ends the process with 1 where nobody reads on.
        if any(isinstance(cause, BrokenPipeError) for cause in _causes(error)):
            return BROKEN_PIPE
        return error.code if isinstance(error.code, int) else INTERNAL if error.code else 0
    code, text = _explain(error)
    if not text:
        return code
    if not debug:
        text = text.strip().splitlines()[0]
    try:
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        print(f"error: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # It accepts nothing, but there is still the exit code.
        _silence(sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Return (exit code, text). An exception with an integer `exit_code` is one that a user can act on."""
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
    """Return (exit code, text) if a lack of file descriptors or a full disk caused `error`, else None."""
    for cause in _causes(error):
        # Some libraries keep only the text of the error.
        if getattr(cause, "errno", None) in _NO_FILES or os.strerror(errno.EMFILE) in str(cause):
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return NO_SPACE, f"too many open files: this process may have {most}; raise the limit with ulimit -n"
        if isinstance(cause, OSError) and cause.errno in DISK_FULL and not isinstance(error, PicompileError):
            return NO_SPACE, f"{cause.strerror}: {cause.filename}" if cause.filename else str(cause.strerror)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, then its causes."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# Signals that ask a command to end: from `docker stop`, systemd and batch systems, and from a terminal that is closed.
_ASKED = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C asked the process to end. Code that cleans up on Ctrl-C does so for it too."""


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """Raise `Stopped` on SIGTERM and SIGHUP inside the block; yield the list of signals that came, Ctrl-C included.

    A signal that is ignored stays ignored: `nohup` and shells ignore some for their children. Outside of the main
    thread, where Python allows no handlers, nothing changes.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped

    before = {number: signal.getsignal(number) for number in (*_ASKED, signal.SIGINT)}
    mine = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    try:
        for number in mine:
            signal.signal(number, stop)
        yield came
    finally:
        for number in mine:
            signal.signal(number, before[number])


_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def complete_streams() -> None:
    """Open standard streams that the parent process closed (`>&-`) as /dev/null.

    Otherwise the next files that are opened would get their numbers, and output that a library writes to number 1
    would go into an artifact.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        if handle != number and not _is_open(number):
            os.dup2(handle, number)
            os.close(handle)
            handle = number
        setattr(sys, name, open(handle, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (stays open)


def silence_stdout() -> None:
    """Discard all further output on stdout."""
    _silence(sys.stdout)


def _silence(stream: IO[str]) -> None:
    """Discard what is still written to a stream: Python flushes it once more when it ends, which would fail again."""
    with suppress(OSError, ValueError):  # not a real file, as under a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


app = typer.Typer(
    name="picompile",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, Callable[..., None]] = {
    "compile": compile_command,
    "run": run_command,
    "chat": chat_command,
    "serve": serve_command,
    "list": list_command,
    "pull": pull_command,
    "rm": rm_command,
    "inspect": inspect_command,
    "verify": verify_command,
    "bench": bench_command,
    "eval": eval_command,
    "import-predictors": import_predictors_command,
    "synth": synth_command,
    "profile": profile_command,
    "train": train_command,
    "plan": plan_command,
    "report": report_command,
    "passes": passes_command,
    "diff": diff_command,
    "targets": targets_command,
    "models": models_command,
    "doctor": doctor_command,
}
# The panels of `picompile --help`, in their order. A command that is in no other panel is in the first.
PANELS: dict[str, tuple[str, ...]] = {
    "Use a model": (),
    "Compile": ("compile", "plan", "models", "targets"),
    "Check and measure": ("inspect", "verify", "bench", "eval", "report"),
    "Study": ("profile", "train", "import-predictors", "synth", "passes", "diff"),
}


def panel_of(command: str) -> str:
    """Return the panel of `picompile --help` that has a command."""
    return next((panel for panel, names in PANELS.items() if command in names), next(iter(PANELS)))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"picompile {__version__} (Python {platform.python_version()})")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Compile language models for this machine, and run them.

    MODEL is a name on the Hugging Face hub (ORG/REPO, ORG/REPO:Q4_K_M), a
    checkpoint's folder or a GGUF file; ARTIFACT is a folder that compile made.
    picompile COMMAND --help explains a command by examples.
    """


for _name in sorted(COMMANDS, key=lambda name: list(PANELS).index(panel_of(name))):
    app.command(_name, cls=ShortHelpCommand, rich_help_panel=panel_of(_name))(takes_options(COMMANDS[_name]))


@dataclass
class Session:
    """The state of one invocation, set by its options and read when it ends."""

    debug: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: the process's own) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    session = Session()
    complete_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the text
    with stoppable() as came:
        try:
            # typer's own entry would turn some errors into other exit codes and paint boxes around the rest.
            with get_command(app).make_context("picompile", words, obj=session) as context:
                context.command.invoke(context)
            sys.stdout.flush()
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            # A library may have turned the signal's exception into another error.
            return SIGNALLED + came[0] if came else report(error, debug=session.debug)
    return 0
