"""`picompile targets`: the machines that models can be planned and compiled for."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.tables import print_table
from picompile.machine.targets import TARGETS, Target
from picompile.quantities import format_bytes

_WIDTH = 120


def targets_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """List the machines that models can be planned and compiled for.

    The one called local is this machine. picompile doctor measures it.

    \b
    Examples:
      picompile targets
      picompile targets --json
    """
    from picompile.machine.measured import cached_local

    local = cached_local()
    rows = [*TARGETS.values(), *([] if local is None else [local.target])]
    if json_output:
        print(json.dumps([{**asdict(row), "compiles": row.compiles} for row in rows], indent=2, ensure_ascii=False))
        return
    _print_table(rows)
    print("bandwidth and PCIe: at best, PCIe in each direction; local: as measured")
    if local is None:
        print("local is this machine, not measured yet: picompile doctor does")
    for row in rows:
        if row.source.startswith("http"):
            print(f"{row.name:>6}: {row.source}")


def _print_table(rows: Sequence[Target]) -> None:
    from rich.table import Table

    table = Table("target", "machine", box=None, pad_edge=False)
    for right in ("memory", "bandwidth", "PCIe", "architecture"):
        table.add_column(right, justify="right")
    table.add_column("for")
    for row in rows:
        table.add_row(row.name, row.description, *_gpu(row), "plan, compile" if row.compiles else "plan")
    # Each row is one line, even if the width of the terminal is not known.
    print_table(table, _WIDTH)


def _gpu(row: Target) -> tuple[str, str, str, str]:
    if not row.vram_bytes:
        return "", "", "", ""
    memory, pcie = format_bytes(row.gpu_bytes_per_s), format_bytes(row.pcie_bytes_per_s)
    return f"{row.vram_bytes / 2**30:.3g} GiB", f"{memory}/s", f"{pcie}/s", row.architecture
