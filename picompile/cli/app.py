"""The application: its commands, and the one place where errors become exit codes."""

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from typer.main import get_command

from picompile import __version__
from picompile.cli.bench import bench_command
from picompile.cli.compile import compile_command
from picompile.cli.diff import diff_command
from picompile.cli.doctor import doctor_command
from picompile.cli.eval import eval_command
from picompile.cli.failures import SIGNALLED, report
from picompile.cli.import_predictors import import_predictors_command
from picompile.cli.inspect import inspect_command
from picompile.cli.passes import passes_command
from picompile.cli.plan import plan_command
from picompile.cli.profile import profile_command
from picompile.cli.report import report_command
from picompile.cli.run import run_command
from picompile.cli.stopping import stoppable
from picompile.cli.streams import complete_streams
from picompile.cli.synth import synth_command
from picompile.cli.targets import targets_command
from picompile.cli.train import train_command
from picompile.cli.verify import verify_command

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
    "doctor": doctor_command,
}


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
    """Compile a sparsely firing language model into an artifact that runs fast, and run it.

    MODEL is a Hugging Face folder with safetensors; ARTIFACT is a folder that
    compile made. picompile COMMAND --help explains a command by examples.
    """


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


@dataclass
class Session:
    """What one invocation carries from its options to its end."""

    debug: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line on `arguments` (default: the process's own) and returns the exit code."""
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
        except (Exception, KeyboardInterrupt) as error:
            # A library may have made another error of it.
            return SIGNALLED + came[0] if came else report(error, debug=session.debug)
    return 0
