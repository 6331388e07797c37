"""Print rich's tables without the blanks that fill their last columns."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_table(table: "Table", width: int | None = None) -> None:
    """Print a table, at most `width` columns wide; by default, at most as wide as the terminal.

    No line ends in blanks: they would be in every file that the output is written to.
    """
    from rich.console import Console

    console = Console(markup=False, highlight=False, width=width)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
