"""The speed and the quality of placement.

python -m benchmarks.placement times [--plot docs/images/solver_time.png]
python -m benchmarks.placement policies [--instances 1000]

times     how long both objectives take by the size of the model
policies  expected time of a token by policy, on random models and machines

Figures come as JSON with --json FILE, and as a table at the end.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.placement.models import Row
from benchmarks.placement.policies import compare_policies
from benchmarks.placement.times import times
from benchmarks.script import argument_parser, markdown, write_json


def table(rows: Sequence[Row]) -> str:
    """In Markdown; a column for every name in any row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return markdown(names, ([cell(row.get(name)) for name in names] for row in rows))


def cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argument_parser(__doc__, "--json", seed=0)
    commands = parser.add_subparsers(required=True)
    of_times = commands.add_parser("times")
    of_times.add_argument("--most", type=int, default=10, help="largest size, in multiples of OPT-175B")
    of_times.add_argument("--plot", type=Path)
    of_policies = commands.add_parser("policies")
    of_policies.add_argument("--instances", type=int, default=1000)
    of_policies.add_argument("--layers", type=int, default=20, help="most layers of a model")
    of_policies.add_argument("--alone-every", type=int, default=5, help="solve every Nth instance without policies too")
    of_times.set_defaults(run=times)
    of_policies.set_defaults(run=compare_policies)
    options = parser.parse_args()
    start = time.perf_counter()
    rows = options.run(options)
    write_json(options.json, rows)
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}))
    print(table(rows))


if __name__ == "__main__":
    main()
