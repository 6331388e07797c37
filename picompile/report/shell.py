"""The HTML pages of picompile: one file each, which loads nothing. All templates extend one shell."""

from pathlib import Path
from typing import Any

import jinja2

from picompile.report.numbers import unbroken


def render(template: str, command: str, title: str, **values: Any) -> str:
    """Return the page that `template`, a file of templates/, becomes with `values`.

    Args:
        template: name without its extension, as `report`.
        command: the command that makes the page; it is named in the page's head.
        title: the title of the page.
        values: what the template reads; a name that it reads and that is missing raises `jinja2.UndefinedError`.

    Returns:
        The HTML. Names of files need not be text: what UTF-8 cannot encode is replaced.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = unbroken
    html = environment.get_template(f"{template}.html.jinja").render(command=command, title=title, **values)
    return html.lstrip().encode("utf-8", "replace").decode("utf-8")
