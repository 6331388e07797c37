"""`picompile serve`: serve models by OpenAI's API, with a page for chats."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from picompile.cli.options import DebugOption
from picompile.cli.progress import progress
from picompile.library.options import LibraryOptions
from picompile_server.declared import SERVE_OPTIONS


def serve_command(
    values: Annotated[dict[str, Any], SERVE_OPTIONS],
    library: LibraryOptions,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="An artifact; or a name on the hub, a Hugging Face folder or a GGUF file, compiled on first use.",
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Serve models by OpenAI's API; the page at / is a chat.

    Requests call a model as it is named here: by its name on the hub, or by that
    of its folder or file. As many answers are made at a time as the artifact was
    compiled for (compile --sequences; four for a model that serve compiles). Ctrl-C
    and SIGTERM end the server when the running answers are complete.

    \b
    Examples:
      picompile serve Qwen/Qwen3-0.6B --context 16384
      picompile serve build/tiny --model other=build/other --port 0
      PICOMPILE_API_KEY=… picompile serve build/tiny --host 0.0.0.0
    """
    from picompile_server.http.server import serve
    from picompile_server.options import serve_options

    # What is wrong with other options is said before a model is compiled.
    serve_options(source, values)
    with ExitStack() as stack:
        serve(serve_options(None, values | {"model": _compiled(source, values["model"], library, stack)}))


def _compiled(model: str | None, named: Sequence[str], library: LibraryOptions, stack: ExitStack) -> list[str]:
    """Return each model as NAME=ARTIFACT, after compiling those that need it; `stack` keeps them from being removed."""
    from picompile.library import open_model

    found = []
    with progress() as shown:
        if model is not None:
            opened = stack.enter_context(open_model(model, library, shown))
            found.append(f"{opened.name}={opened.artifact}")
        for text in named:
            name, _, each = text.partition("=")
            found.append(f"{name}={stack.enter_context(open_model(each, library, shown)).artifact}")
    return found
