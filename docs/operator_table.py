"""Write the table of operators of docs/write_a_pass.md from their records: `python docs/operator_table.py`.

tests/test_docs.py holds that the file is what this script would write.
"""

import re
from pathlib import Path

from picompile_passes.dialect import OPERATORS, Operator

PAGE = Path(__file__).with_name("write_a_pass.md")
_TABLE = re.compile(r"(<!-- operators -->\n).*?(<!-- end of operators -->)", re.DOTALL)


def operator_table() -> str:
    """Return the Markdown table of the operators of the dialect, in order of their names."""
    rows = ["| operator | part | graphs | dimensions | what it computes |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*rows, *(_row(OPERATORS[name]) for name in sorted(OPERATORS.builtin))]) + "\n"


def _row(operator: Operator) -> str:
    dimensions = ", ".join(f"{name} [{', '.join(letters)}]" for name, letters in operator.dimensions.items())
    equation = (operator.eager.__doc__ or "").strip().partition("\n")[0]
    if operator.target.namespace == "aten":
        equation = f"`{operator.target}`"
    cells = (f"`{operator.name}`", operator.part, ", ".join(operator.forms), dimensions, equation.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def with_table(page: str) -> str:
    """Return the text of a page with the table as the operators are now."""
    return _TABLE.sub(lambda found: f"{found[1]}{operator_table()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
