"""The measurements of this machine in the user's cache folder, as JSON.

A file that is damaged, which the sha256 of its content shows, of another version or of another machine counts as none,
and one that cannot be written only costs the time to measure again.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.errors import PicompileError
from picompile.measure.gpu import GpuSpeed
from picompile.measure.host import Host
from picompile.output import writing_file
from picompile_runtime import ArtifactError
from picompile_runtime.fields import Fields, parse_object

if TYPE_CHECKING:
    from picompile.measure.local import LocalMachine, Machine

# Counts up when something is measured in another way.
_SCHEMA = 1


def cache_file() -> Path:
    """$XDG_CACHE_HOME/picompile/local.json. Raises `RuntimeError` where this user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "picompile" / "local.json"


def load(machine: "Machine", no_gpu: str) -> "LocalMachine | None":
    """What is kept of `machine`; `no_gpu` says why it has no GPU now, if it has none."""
    from picompile.measure.local import LocalMachine

    with suppress(OSError, RuntimeError, ArtifactError):
        path = cache_file()
        fields = parse_object(path.read_bytes(), str(path))
        content = dict(fields.data)
        if content.pop("sha256", None) != _digest(content):
            return None
        if fields.data.get("schema") != _SCHEMA or fields.data.get("machine") != asdict(machine):
            return None
        host = fields.object("host")
        speed = None if machine.gpu is None else _speed(fields.object("speed"))
        memory = Host(host.integer("bytes", least=1), _positive(host, "bytes_per_s"))
        return LocalMachine(machine, memory, speed, no_gpu, _positive(fields, "measured_at_s"))
    return None


def _speed(fields: Fields) -> GpuSpeed:
    return GpuSpeed(
        fields.integer("free_bytes"),
        _positive(fields, "copy_bytes_per_s"),
        _positive(fields, "down_bytes_per_s"),
        _positive(fields, "up_bytes_per_s"),
        _positive(fields, "exchange_s"),
    )


def _positive(fields: Fields, key: str) -> float:
    value = fields.data.get(key)
    # JSON of Python may hold NaN and Infinity.
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < 1e300:
        raise fields.wrong(key, "a positive number")
    return float(value)


def store(measured: "LocalMachine") -> None:
    """Keeps `measured` in place of what was kept; whoever reads meanwhile sees the one or the other."""
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "measured_at_s": measured.measured_at_s,
        "machine": asdict(measured.machine),
        "host": asdict(measured.host),
        "speed": None if measured.speed is None else asdict(measured.speed),
    }
    content["sha256"] = _digest(content)
    with suppress(OSError, RuntimeError, PicompileError):
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing_file(path, overwrite=True) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
