"""`picompile diff`: what differs between two dumps of a graph, as text and as a page."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from picompile.cli.checks import require_page, require_text_file, write_page
from picompile.cli.options import DebugOption, JsonOption, OverwriteOption
from picompile.errors import UsageError

if TYPE_CHECKING:
    from picompile.report.graph import Compared, Line
    from picompile_passes.graph.dump_reader import DumpGraph

_WANTED = "A and B are two dumps that compile --dump-ir wrote, or two folders of them"
_DUMP = re.compile(r"(?P<number>\d+)_(?P<pass_name>.+)\.txt")
_STYLES = {"removed": "red", "added": "green", "changed": "yellow", "section": "bold", "title": "bold"}


def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help="A dump, NNN_pass.txt, or a folder of dumps.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The dump, or the folder of dumps, to compare with A.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page that shows both graphs side by side.")
    ] = None,
    overwrite: OverwriteOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two dumps of a graph, node by node.

    Nodes are found by their names. Layers that changed as another did are listed
    once. Of two folders, the dumps after passes of one name are compared.

    \b
    Examples:
      picompile compile models/tiny-reglu -o build/tiny --dump-ir build/ir
      picompile diff build/ir/012_stamp-layers.txt build/ir/013_insert-predictors.txt
      picompile diff build/ir/012_stamp-layers.txt build/ir/015_quantize.txt --html build/diff.html
    """
    if html is not None:
        require_page(html, "--html", overwrite=overwrite)
    found = _find(before, after)
    if html is not None:
        write_page(html, _page(found), "--html", overwrite=overwrite)
    if json_output:
        print(json.dumps(_json(found), indent=2, ensure_ascii=False))
        return
    lines = _summary(found) if html is not None else _listing(found)
    show = _printer()
    for line in lines:
        show(line)
    if html is not None:
        print(f"{html}: both graphs")


@dataclass(frozen=True)
class _Found:
    """The pairs that were compared, and the files without a counterpart."""

    compared: "Sequence[Compared]"
    in_folders: bool
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()


def _find(before: Path, after: Path) -> _Found:
    for path in (before, after):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder; {_WANTED}")
    if before.is_dir() != after.is_dir():
        folder, file = (before, after) if before.is_dir() else (after, before)
        raise UsageError(f"{folder} is a folder and {file} is a file; {_WANTED}")
    if not before.is_dir():
        return _Found([_compare(before, after)], in_folders=False)
    left, right = _dumps(before), _dumps(after)
    compared = [_compare(left[key], right[key]) for key in left if key in right]
    only_before = tuple(left[key].name for key in left if key not in right)
    only_after = tuple(right[key].name for key in right if key not in left)
    return _Found(compared, True, only_before, only_after)


def _dumps(folder: Path) -> dict[tuple[str, int], Path]:
    """Return the dumps of a folder in order, by the pass's name and how often that came before."""
    found = [(match, path) for path in folder.iterdir() if (match := _DUMP.fullmatch(path.name))]
    if not found:
        raise UsageError(f"{folder}: holds no dumps (000_input.txt, …); {_WANTED}")
    times: Counter[str] = Counter()
    dumps = {}
    for match, path in sorted(found, key=lambda item: int(item[0]["number"])):
        name = match["pass_name"]
        dumps[name, times[name]] = path
        times[name] += 1
    return dumps


def _compare(before: Path, after: Path) -> "Compared":
    from picompile.report.graph import Compared, compare

    return Compared(before.name, after.name, compare(_read(before), _read(after)))


def _read(path: Path) -> "DumpGraph":
    from picompile_passes.graph.dump_reader import DumpError, read_dump

    try:
        return read_dump(require_text_file(path))
    except DumpError as error:
        raise UsageError(f"{path}: {error}") from error


def _page(found: _Found) -> str:
    from picompile.report.graph import render_page

    return render_page([item for item in found.compared if not (found.in_folders and item.comparison.equal)])


def _json(found: _Found) -> dict[str, Any]:
    from picompile.report.graph import changes_json

    compared = []
    for item in found.compared:
        changes = changes_json(item.comparison)
        changes["before"] = {"file": item.before_name, **changes["before"]}
        changes["after"] = {"file": item.after_name, **changes["after"]}
        compared.append(changes)
    if not found.in_folders:
        return compared[0]
    return {"compared": compared, "only_before": list(found.only_before), "only_after": list(found.only_after)}


def _summary(found: _Found) -> "Iterator[Line]":
    """Yield a summary of each pair, without the changes themselves."""
    from picompile.report.graph import Line, counts_text, graph_summary

    if not found.in_folders:
        (item,) = found.compared
        width = max(len(item.before_name), len(item.after_name))
        yield Line("title", f"{item.before_name:{width}}  {graph_summary(item.comparison.before)}")
        yield Line("title", f"{item.after_name:{width}}  {graph_summary(item.comparison.after)}")
        yield Line("note", counts_text(item.comparison))
        return
    names = [_names(item) for item in found.compared]
    width = max(map(len, names), default=0)
    for name, item in zip(names, found.compared, strict=True):
        yield Line("note", f"{name:{width}}  {counts_text(item.comparison)}")
    for side, only in (("A", found.only_before), ("B", found.only_after)):
        yield from (Line("note", f"{name:{width}}  only in {side}") for name in only)


def _names(item: "Compared") -> str:
    same = item.before_name == item.after_name
    return item.before_name if same else f"{item.before_name} → {item.after_name}"


def _listing(found: _Found) -> "Iterator[Line]":
    """Yield the summary, and the changes of every pair that differs."""
    from picompile.report.graph import Line, graph_summary, listing

    yield from _summary(found)
    for item in found.compared:
        comparison = item.comparison
        if comparison.equal:
            continue
        yield Line("note", "")
        if found.in_folders:
            yield Line("title", f"{_names(item)}: {graph_summary(comparison.before)}")
            yield Line("title", f"{' ' * len(_names(item))}  {graph_summary(comparison.after)}")
        yield from listing(comparison)


def _printer() -> "Callable[[Line], None]":
    """Return a function that prints a line, in colour on a terminal."""
    if not sys.stdout.isatty():
        return lambda line: print(line.text)
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    return lambda line: console.print(Text(line.text, _STYLES.get(line.kind, "")), soft_wrap=True)
