"""`picompile serve`: serve models by OpenAI's API, with a page for chats."""

from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.cli.options import DebugOption
from picompile_server.declared import SERVE_OPTIONS


def serve_command(
    values: Annotated[dict[str, Any], SERVE_OPTIONS],
    artifact: Annotated[
        Path | None, typer.Argument(metavar="ARTIFACT", help="A compiled model's folder, served under its name.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Serve models by OpenAI's API; the page at / is a chat.

    As many answers are made at a time as the artifact was compiled for
    (--sequences). Ctrl-C and SIGTERM end the server when the running answers are
    complete.

    \b
    Examples:
      picompile serve build/tiny
      picompile serve build/tiny --model other=build/other --port 0
      PICOMPILE_API_KEY=… picompile serve build/tiny --host 0.0.0.0
    """
    from picompile_server.http.server import serve
    from picompile_server.options import serve_options

    serve(serve_options(artifact, values))
