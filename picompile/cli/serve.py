"""`picompile serve`: serve models by OpenAI's API, with a page for chats."""

from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.cli.options import DebugOption, ReplanOption, ThreadsOption
from picompile_server.options import SERVE_OPTIONS

# The default of each option.
_DEFAULTS: Any = {key: option.default for key, option in SERVE_OPTIONS.items()}


def _option(key: str) -> Any:
    """Return the option that `picompile_server.options` declares under `key`."""
    declared = SERVE_OPTIONS[key]
    least, most = (
        int(bound) if bound is not None and declared.kind is int else bound for bound in (declared.least, declared.most)
    )
    return typer.Option(*declared.names, help=declared.help, metavar=declared.metavar, min=least, max=most)


def serve_command(
    artifact: Annotated[
        Path | None, typer.Argument(metavar="ARTIFACT", help="A compiled model's folder, served under its name.")
    ] = None,
    host: Annotated[str, _option("host")] = _DEFAULTS["host"],
    port: Annotated[int, _option("port")] = _DEFAULTS["port"],
    api_key: Annotated[list[str] | None, _option("api_key")] = None,
    api_key_file: Annotated[str | None, _option("api_key_file")] = None,
    model: Annotated[list[str] | None, _option("model")] = None,
    threads: ThreadsOption = None,
    replan: ReplanOption = False,
    max_waiting: Annotated[int, _option("max_waiting")] = _DEFAULTS["max_waiting"],
    kv_memory: Annotated[str | None, _option("kv_memory")] = None,
    no_reread: Annotated[bool, _option("no_reread")] = False,
    draft: Annotated[str, _option("draft")] = "ngram",
    max_body: Annotated[str, _option("max_body")] = _DEFAULTS["max_body"],
    cors: Annotated[list[str] | None, _option("cors")] = None,
    allowed_host: Annotated[list[str] | None, _option("allowed_host")] = None,
    drain_timeout: Annotated[float, _option("drain_timeout")] = _DEFAULTS["drain_timeout"],
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

    values = {
        "host": host,
        "port": port,
        "api_key": api_key,
        "api_key_file": api_key_file,
        "model": model,
        "threads": threads,
        "replan": replan,
        "max_waiting": max_waiting,
        "kv_memory": kv_memory,
        "no_reread": no_reread,
        "draft": draft,
        "max_body": max_body,
        "cors": cors,
        "allowed_host": allowed_host,
        "drain_timeout": drain_timeout,
    }
    serve(serve_options(artifact, values))
