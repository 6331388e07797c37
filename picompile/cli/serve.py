"""`picompile serve`: serve models by OpenAI's API, with a page for chats."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.cli.options import COMPILED_HELP, DebugOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.library.options import LibraryOptions
from picompile_server.declared import SERVE_OPTIONS


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
            options = replace(options, models=_kept(stack), load="start" if options.load == "start" else "demand")
        else:
            options = replace(options, models=_compiled(source, values["model"], library, stack))
        serve(options)


def _kept(stack: ExitStack) -> dict[str, Path]:
    """Return the models that are compiled already. Raise `UsageError` if there is none."""
    from picompile.library import Library, open_entry

    models: dict[str, Path] = {}
    for entry in Library().entries():
        opened = open_entry(entry)
        # A model that was compiled with several options is served as it was used last.
        if names := [name for name in (opened.name, *entry.also) if name not in models]:
            models |= dict.fromkeys(names, stack.enter_context(opened).artifact)
    if not models:
        raise UsageError("give a model to serve, as in picompile serve ORG/REPO; none is compiled yet")
    return models


def _compiled(model: str | None, named: Sequence[str], library: LibraryOptions, stack: ExitStack) -> dict[str, Path]:
    """Return the models by their names, after compiling those that need it; `stack` keeps them from being removed."""
    from picompile.library import open_model

    models = {}
    with progress() as shown:
        if model is not None:
            opened = stack.enter_context(open_model(model, library, shown))
            models[opened.name] = opened.artifact
        for text in named:
            name, _, each = text.partition("=")
            models[name] = stack.enter_context(open_model(each, library, shown)).artifact
    return models
