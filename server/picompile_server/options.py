"""Interpretation of the options of `picompile serve`, which `declared` has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from picompile_runtime.errors import RequestError
from picompile_runtime.request_checks import shown
from picompile_runtime.sampling.speculation import check_draft
from picompile_server.declared import KEY_VARIABLE

LoadTime = Literal["start", "demand", "auto"]


@dataclass(frozen=True)
class ServeOptions:
    """The models to serve, and the settings of the server.

    Attributes:
        models: folders of artifacts, by the names that requests give; the first is the default.
        host, port: where to listen.
        keys: API keys; with none, every request is answered.
        load: when models are loaded.
        most_loaded: how many may be loaded at a time; None for any number.
        model_bytes: memory for loaded models; None for most of the machine's.
        threads, replan: as for `picompile_runtime.load`.
        max_waiting, kv_bytes, reread, draft: how requests are scheduled; see `SchedulerOptions`.
        most_body_bytes: largest body of a request.
        origins: of pages that may ask.
        hosts: names that requests may have as Host, beyond those of localhost.
        drain_s: seconds that running answers have when the server is to end.
        keep_s: seconds without requests after which a model is unloaded; None keeps it.
        is_quiet: whether to write no line for each request.
        aliases: other names that requests may call models by, and the names in `models`.
    """

    models: Mapping[str, Path]
    host: str = "127.0.0.1"
    port: int = 8080
    keys: Sequence[str] = ()
    load: LoadTime = "auto"
    most_loaded: int | None = None
    model_bytes: int | None = None
    threads: int | None = None
    replan: bool = False
    max_waiting: int = 256
    kv_bytes: int | None = None
    reread: bool = True
    draft: str = "ngram"
    most_body_bytes: int = 2**24
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    drain_s: float = 30.0
    keep_s: float | None = None
    is_quiet: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


def serve_options(artifact: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> ServeOptions:
    """Return the settings that a command line's options give.

    Args:
        artifact: the artifact that needs no name: its folder's is taken.
        values: the value of each option of `declared.SERVE_OPTIONS`, by key.

    Raises:
        RequestError: a value makes no sense.
    """
    kv_memory, model_memory, keep_alive = (values[key] for key in ("kv_memory", "model_memory", "keep_alive"))
    load, most_loaded = _load_time(values["load"]), values["max_loaded"]
    if load == "start" and (most_loaded, model_memory) != (None, None):
        raise RequestError("--max-loaded and --model-memory limit models that are loaded on demand; give --load demand")
    return ServeOptions(
        models=_models(artifact, values["model"]),
        host=values["host"],
        port=values["port"],
        keys=_keys(values["api_key"], values["api_key_file"]),
        load=load,
        most_loaded=most_loaded,
        model_bytes=None if model_memory is None else parse_size(model_memory, "--model-memory"),
        threads=values["threads"],
        replan=values["replan"],
        max_waiting=values["max_waiting"],
        kv_bytes=None if kv_memory is None else parse_size(kv_memory, "--kv-memory"),
        reread=not values["no_reread"],
        draft=check_draft(values["draft"]),
        most_body_bytes=parse_size(values["max_body"], "--max-body"),
        origins=tuple(values["cors"]),
        hosts=tuple(values["allowed_host"]),
        drain_s=values["drain_timeout"],
        keep_s=None if keep_alive is None else parse_duration(keep_alive, "--keep-alive"),
        is_quiet=values["quiet"],
    )


def _load_time(text: str) -> LoadTime:
    for time in get_args(LoadTime):
        if text == time:
            return cast(LoadTime, time)
    raise RequestError(f"--load takes start, demand or auto, not {shown(text)}")


def _models(artifact: str | os.PathLike[str] | None, named: Sequence[str]) -> dict[str, Path]:
    models = {} if artifact is None else {Path(artifact).resolve().name or "model": Path(artifact)}
    for text in named:
        name, _, folder = text.partition("=")
        if not name or not folder or not name.isprintable():
            raise RequestError(f"--model takes NAME=ARTIFACT, not {shown(text)}")
        if name in models:
            raise RequestError(f"--model: two models have the name {shown(name)}; give another")
        models[name] = Path(folder)
    if not models:
        raise RequestError("give an artifact to serve, or several as --model NAME=ARTIFACT")
    return models


def _keys(given: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Return all API keys, from options, a file and the environment."""
    keys = [*given]
    if file is not None:
        try:
            lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--api-key-file: {file} cannot be read ({error})") from error
        if not any(lines):
            raise RequestError(f"--api-key-file: {file} has no key; write one on each line")
        keys += [line for line in lines if line]
    if variable := os.environ.get(KEY_VARIABLE):
        keys.append(variable)
    for key in keys:
        if not re.fullmatch(r"[!-~]+", key):
            raise RequestError("an API key must be of visible ASCII characters, without spaces, and not empty")
    return tuple(keys)


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str, option: str) -> int:
    """Return the bytes that `text` writes, as 512MiB or 2GB. Raises RequestError, which names the `option`."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        number, power, is_binary = found.groups()
        size = float(number) * (1024 if is_binary else 1000) ** " kmgt".index(power.lower() or " ")
        if size >= 1:
            return int(size)
    raise RequestError(f"{option} takes a size such as 512MiB, not {shown(text)}")


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([smh]?)", re.IGNORECASE | re.ASCII)


def parse_duration(text: str, option: str) -> float:
    """Return the seconds that `text` writes, as 90, 30s, 5m or 1h. Raises RequestError, which names the `option`."""
    found = _DURATION.fullmatch(text.strip())
    if found is not None:
        number, unit = found.groups()
        duration = float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit.lower()]
        if duration > 0:
            return duration
    raise RequestError(f"{option} takes a time such as 90s, 5m or 1h, not {shown(text)}")
