"""What `picompile inspect` shows of an artifact's hot device: what lies where, and what its kernels take."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.cli.checks import format_bytes

if TYPE_CHECKING:
    from picompile_runtime.artifact import DeviceCode, Manifest
    from picompile_runtime.memory import Tensor
    from picompile_runtime.program import Program

_WIDTH = 120
_RESOURCES = ("registers", "local_bytes", "shared_bytes")


def collect_device(
    folder: Path, manifest: "Manifest", program: "Program", tensors: Mapping[str, "Tensor"]
) -> dict[str, Any] | None:
    """What `--json` has of the hot device, None where there is none. Raises `ArtifactError`."""
    code = manifest.hot_device
    if code is None:
        return None
    return {
        "kind": code.kind,
        "sm": code.sm or None,
        "code": [variant.isa for variant in code.variants],
        "memory_bytes": _memory(program, tensors),
        "kernels": [] if code.kind != "cuda" else list(_kernels(folder, code)),
    }


def _memory(program: "Program", tensors: Mapping[str, "Tensor"]) -> dict[str, dict[str, int]]:
    """What lies in each memory. Streamed weights are the host's, and read by the device where they lie."""
    from picompile_runtime.places import weights_of

    used, kept = weights_of(program, "device"), weights_of(program, "host")
    arenas = {
        "device": program.device_arena_bytes,
        "host": program.arena_bytes,
        "shared": program.shared_arena_bytes,
    }
    weights = {
        "device": sum(tensors[name].size_bytes for name in used if name not in program.streamed),
        "host": sum(tensors[name].size_bytes for name in kept),
        "shared": 0,
    }
    caches = dict.fromkeys(arenas, 0)
    for name, tensor in program.state.items():
        caches[program.memories["state", name]] += tensor.size_bytes
    return {
        memory: {"weights": weights[memory], "kv_cache": caches[memory], "workspace": arenas[memory]}
        for memory in arenas
    }


def _kernels(folder: Path, code: "DeviceCode") -> Iterator[dict[str, Any]]:
    """One entry a launch: how it is launched, and what the compiler says that it takes."""
    from picompile_runtime import ArtifactError
    from picompile_runtime.cuda.images import read_images
    from picompile_runtime.fields import parse_object

    path = folder / code.files["launches"]
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{folder}: incomplete ({error}); compile the model again") from error
    entries = parse_object(text, str(path)).object("kernels")
    for name, launches in read_images(text, b"", b"", str(path)).kernels.items():
        for launch, fields in zip(launches, entries.objects(name), strict=True):
            resources = {key: fields.integer(key) for key in _RESOURCES}
            extents = {"grid": list(launch.grid), "block": list(launch.block)}
            yield {"kernel": name, "symbol": launch.symbol, **extents, **resources}


def device_rows(device: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of the table of facts."""
    if device["kind"] == "cuda":
        sm = device["sm"]
        yield "hot device", f"GPU of compute capability {sm // 10}.{sm % 10}; newer ones by PTX"
    else:
        yield "hot device", f"a second partition of the CPU: {', '.join(device['code'])}"
    for memory, parts in device["memory_bytes"].items():
        held = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size]
        yield {"shared": "shared memory"}.get(memory, f"on the {memory}"), ", ".join(held) or "nothing"


def show_kernels(kernels: Sequence[Mapping[str, Any]]) -> None:
    """A table with a line for each launch on the GPU."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("launch", overflow="fold")
    for title in ("blocks", "threads", "registers", "local B", "shared B"):
        table.add_column(title, justify="right")
    for kernel in kernels:
        blocks = " x ".join(str(extent) for extent in kernel["grid"] if extent > 1) or "1"
        figures = [str(kernel[key]) for key in _RESOURCES]
        table.add_row(kernel["symbol"], blocks, str(kernel["block"][0]), *figures)
    # A launch is to be a line, also where nobody says how wide the terminal is.
    Console(markup=False, highlight=False, width=_WIDTH).print(table)
