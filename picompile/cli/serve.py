"""`picompile serve`: serve models by OpenAI's API, with a page for chats."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from picompile.cli.options import COMPILED_HELP, DebugOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.library.options import LibraryOptions
from picompile_server.declared import SERVE_OPTIONS

if TYPE_CHECKING:
    from picompile.library import OpenModel


def serve_command(
    values: Annotated[dict[str, Any], SERVE_OPTIONS],
    library: LibraryOptions,
    source: Annotated[str | None, typer.Argument(metavar="MODEL", help=COMPILED_HELP)] = None,
    debug: DebugOption = False,
) -> None:
    """Serve models by OpenAI's API; the page at / is a chat.

    Without a MODEL, all models in picompile list are served, each loaded when it is
    first asked for. Requests call a model as it is named here: by its name on the
    hub, or by that of its folder or file. As many answers are made at a time as the
    artifact was compiled for (compile --sequences; four for a model that serve
    compiles). Ctrl-C and SIGTERM end the server when the running answers are
    complete.

    \b
    Examples:
      picompile serve
      picompile serve Qwen/Qwen3-0.6B --context 16384
      picompile serve build/tiny --model other=build/other --port 0
      PICOMPILE_API_KEY=… picompile serve build/tiny --host 0.0.0.0
    """
    from picompile_server.http.server import serve
    from picompile_server.options import serve_options

    is_library = source is None and not values["model"]
    # Errors in other options are raised before a model is compiled. The models are put in after that.
    options = serve_options("library" if is_library else source, values)
    with ExitStack() as stack:
        if is_library:
            options = replace(options, load="start" if options.load == "start" else "demand")
            opened = _kept(stack)
        else:
            opened = _compiled(source, values["model"], library, stack)
        others = ((other, name) for name, each in opened.items() for other in each.also if other not in opened)
        serve(replace(options, models={name: each.artifact for name, each in opened.items()}, aliases=dict(others)))


def _kept(stack: ExitStack) -> "dict[str, OpenModel]":
    """Return the models that are compiled already. Raise `UsageError` if there is none."""
    from picompile.library import Library, open_entry

    models: dict[str, OpenModel] = {}
    for entry in Library().entries():
        opened = open_entry(entry)
        # A model that was compiled with several options is served as it was used last.
        if opened.name not in models:
            models[opened.name] = stack.enter_context(opened)
    if not models:
        raise UsageError("give a model to serve, as in picompile serve ORG/REPO; none is compiled yet")
    return models


def _compiled(
    model: str | None, named: Sequence[str], library: LibraryOptions, stack: ExitStack
) -> "dict[str, OpenModel]":
    """Return the models by their names, after compiling those that need it; `stack` keeps them from being removed."""
    from picompile.library import open_model

    models = {}
    with progress() as shown:
        if model is not None:
            opened = stack.enter_context(open_model(model, library, shown))
            models[opened.name] = opened
        for text in named:
            name, _, each = text.partition("=")
            models[name] = stack.enter_context(open_model(each, library, shown))
    return models
