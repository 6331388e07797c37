"""`picompile list`, `rm` and `pull`: the models that were compiled when they were first used."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.library.options import LibraryOptions
from picompile.quantities import format_bytes

if TYPE_CHECKING:
    from picompile.library.entry import Entry

_HEADINGS = ("NAME", "FORMAT", "CONTEXT", "SIZE", "LAST USED")
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))


def list_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """List the models that chat, run and serve have compiled, the last used one first.

    They lie in the cache folder ($XDG_CACHE_HOME/picompile/models, or
    PICOMPILE_MODELS). Together they take at most PICOMPILE_MODELS_BUDGET, by default
    100 GB or half of the disk; beyond, those are removed that were not used for the
    longest time.

    \b
    Examples:
      picompile list
      picompile list --json
    """
    from picompile.library import Library

    library = Library()
    entries = library.entries()
    if json_output:
        print(json.dumps([entry.to_json() for entry in entries], indent=2, ensure_ascii=False))
        return
    if not entries:
        print("no models yet; picompile chat ORG/REPO downloads and compiles one")
        return
    now = time.time()
    rows = []
    for each in entries:
        size, used = format_bytes(each.size_bytes), _ago(now - each.used_s)
        rows.append((each.name, each.quant, str(each.context), size, used))
        # Another name of the same files has a row of its own.
        rows += [(other, "", "", "", "") for other in each.also]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    total = sum(each.size_bytes for each in entries)
    print(f"{format_bytes(total)} of {format_bytes(library.budget_bytes())} in {library.folder}")
    downloads = {Path(path) for each in entries for path in each.downloads}
    if downloaded := sum(path.stat().st_size for path in downloads if path.exists()):
        print(
            f"{format_bytes(downloaded)} of downloads for them lie in the hub's cache: rm --only-downloads removes them"
        )


def rm_command(
    names: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models as picompile list names them.")],
    downloads: Annotated[
        bool, typer.Option("--downloads", help="Also remove the files that were downloaded for them.")
    ] = False,
    only_downloads: Annotated[
        bool,
        typer.Option("--only-downloads", help="Remove these files alone; the compiled models stay and need none."),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Remove compiled models.

    Downloaded files stay, since other programs share them; --downloads removes
    them too. A checkpoint or GGUF file of your own is never removed.

    \b
    Examples:
      picompile rm Qwen/Qwen3-0.6B
      picompile rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M --downloads
      picompile rm Qwen/Qwen3-0.6B --only-downloads
    """
    from picompile.hub import remove_downloads
    from picompile.library import Library

    library = Library()
    found = {name: library.named(name) for name in names}
    for name, entries in found.items():
        if not entries:
            known = ", ".join(dict.fromkeys(name for entry in library.entries() for name in entry.names)) or "none"
            raise UsageError(f"{name}: no compiled model has this name; there is {known}")
    for name, entries in found.items():
        own, freed = {path for entry in entries for path in entry.downloads}, 0
        if not only_downloads:
            for entry in entries:
                library.remove(entry)
            freed = sum(entry.size_bytes for entry in entries)
            own -= {path for entry in library.entries() for path in entry.downloads}
        if downloads or only_downloads:
            freed += remove_downloads(map(Path, own))
        print(f"removed {_removed(name, entries, only_downloads)}: {format_bytes(freed)}")


def pull_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model on the hub: ORG/REPO, ORG/REPO:Q4_K_M.")],
    library: LibraryOptions,
    debug: DebugOption = False,
) -> None:
    """Download a model and compile it, or bring it up to date.

    chat, run and serve do that too when a model is not there yet; they never ask
    the hub for a newer version of one that is.

    \b
    Examples:
      picompile pull Qwen/Qwen3-0.6B
      picompile pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M --context 16384
    """
    from picompile.hub import parse_model
    from picompile.library import Library

    model = parse_model(name)
    if isinstance(model, Path):
        raise UsageError(f"{name}: is a path; pull takes the name of a model on the hub, as in hf://ORG/REPO")
    with progress() as shown:
        entry = Library().obtain(model, library, shown, refresh=True)
    print(f"{entry.name}: {entry.quant}, context {entry.context}, {format_bytes(entry.size_bytes)}")


def _removed(name: str, entries: "Sequence[Entry]", only_downloads: bool) -> str:
    """Return what `rm` has removed, with the other names that it had and the options of several artifacts."""
    if only_downloads:
        return f"the downloads of {name}"
    others = dict.fromkeys(each for entry in entries if not entry.is_path for each in entry.names if each != name)
    also = f", which is also {', '.join(others)}" if others else ""
    several = ", ".join(f"{each.quant} with context {each.context}" for each in entries) if len(entries) > 1 else ""
    return f"{name}{also}{several and f' ({several})'}"


def _ago(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
