"""`picompile models`: which of transformers' decoders are known to compile, and whether their neurons can be silent."""

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Annotated, Any

import typer

from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.tables import print_table
from picompile.errors import UsageError

_WIDTH = 170
# Names for what transformers calls `layer_types`, and for layers without rotary embedding.
_LAYERS = {
    "full_attention": "full attention",
    "sliding_attention": "sliding windows",
    "chunked_attention": "chunked attention",
    "conv": "short convolution",
    "linear_attention": "recurrence",
    "hybrid": "attention beside recurrence",
    "hybrid_sliding": "windows beside recurrence",
    "indexed_attention": "indexed attention",
    "compressed_sparse_attention": "compressed sparse attention",
    "heavily_compressed_attention": "heavily compressed attention",
    "minimax_m3_sparse": "sparse attention",
    "moe": "mixtures of experts",
    "mlp": "feed-forward blocks alone",
    "no_rope": "no rotary embedding",
}
_MOST_REASON = 80
# Most reasons begin with this.
_PREFIX = "the graph cannot be expressed in the dialect: "


def models_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A class, or the model_type of a config.json; part of it will do."),
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="List what is refused instead, and why.")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the models that are known to compile.

    Each was compiled with small random weights and every kind of layer that its class has, and gives the tokens of
    eager PyTorch. Other classes that transformers has are tried all the same: a compilation compares its own model
    with eager PyTorch first.

    \b
    Examples:
      picompile models
      picompile models gemma
      picompile models --refused --json
    """
    entries = [entry for entry in known_models() if name is None or _is_named(entry, name)]
    if name is not None and not entries:
        raise UsageError(f"transformers has no causal language model of a class or type with {name!r} in it")
    # What was asked for by name is told in either case, and all of it as JSON.
    every = name is not None or (json_output and not refused)
    shown = [entry for entry in entries if every or (entry["result"] != "ok") == refused]
    if json_output:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    _print_table(shown)
    compiled = sum(entry["result"] == "ok" for entry in entries)
    print(f"{compiled} of {len(entries)} model types compile; silent: by the class's default activation")


def known_models() -> list[dict[str, Any]]:
    """Return what was tried: for each model type its class, the result, the activation or the reason."""
    entries: list[dict[str, Any]] = json.loads(files("picompile").joinpath("models.json").read_text(encoding="utf-8"))
    return entries


def _is_named(entry: Mapping[str, Any], name: str) -> bool:
    return name.lower() in entry["class"].lower() or name.lower() in entry["model_type"].lower()


def _print_table(entries: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("class", "model type", "activation", "silent", "layers"):
        table.add_column(title, no_wrap=True)
    for entry in entries:
        table.add_row(entry["class"], entry["model_type"], *_cells(entry))
    # Each row is one line, even if the width of the terminal is not known.
    print_table(table, _WIDTH)


def _cells(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    if entry["result"] == "ok":
        layers = layer_names(entry["kinds"])
        if not entry["blocks"]:
            whole = "its feed-forward blocks are not of the dialect's form: every neuron is computed"
            return "", "no", f"{layers}; {whole}" if layers else whole
        return entry["activation"], "yes" if entry["silent"] else "no", layers
    if entry["result"] == "part":
        return "", "", f"{layer_names(entry['kinds'])} alone; refused: {layer_names(entry['refused_kinds'])}"
    reason = entry["reason"].partition(": ")[2].removeprefix(_PREFIX)
    return "", "", f"{entry['result']}: {reason[:_MOST_REASON]}"


def layer_names(kinds: Iterable[str]) -> str:
    """Return the names of kinds of layers, which are transformers' `layer_types` or one of ours."""
    return ", ".join(_LAYERS[kind] for kind in kinds)
