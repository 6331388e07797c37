"""`picompile report`: pictures of profiles, predictors, artifacts and plans, on one page."""

from pathlib import Path
from typing import Annotated

import typer

from picompile.cli.checks import require_page, write_page
from picompile.cli.options import DebugOption, OverwriteOption
from picompile.cli.progress import progress


def report_command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Profiles, predictors, artifacts and plans, in any order.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The HTML page to write.")],
    overwrite: OverwriteOption = False,
    debug: DebugOption = False,
) -> None:
    """Show profiles, predictors, artifacts and plans in pictures, on one HTML page.

    The page loads nothing and works offline. What is known of several predictors
    stands side by side in its first table. Needs matplotlib.

    \b
    Examples:
      picompile report build/profile -o build/profile.html
      picompile report build/profile build/predictors build/tiny -o build/report.html
    """
    require_page(output, "-o", overwrite=overwrite)

    from picompile.report.drawing import require_matplotlib
    from picompile.report.page import read_sources, render_report

    require_matplotlib()
    sources = read_sources(paths)
    with progress() as shown, shown.step("draw", len(sources)) as advance:
        html = render_report(sources, advance)
    write_page(output, html, "-o", overwrite=overwrite)
    print(f"{output}: {len(sources)} section{'s' if len(sources) > 1 else ''}, {len(html.encode()) / 1e6:.2f} MB")
