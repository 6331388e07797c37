"""How fast, how good and how safe placement is.

python -m benchmarks.placement times [--direct] [--plot docs/images/solver_time.png]
python -m benchmarks.placement policies [--instances 1000]
python -m benchmarks.placement prefixes [--instances 2000]
python -m benchmarks.placement safety [--count 10000]

times     how long both objectives take by the size of the model; with --direct, the direct programs beside them
policies  expected time of a token by policy, on random models and machines
prefixes  what prefixes lose against any sets of groups, on random small instances, against brute force
safety    random budgets, shapes and contexts, absurd ones among them: what a plan takes against its budget, and whether
          budgets that a refusal names will do

Figures come as JSON with --json FILE, and as a table at the end.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.placement.models import Row
from benchmarks.placement.policies import compare_policies, prefixes
from benchmarks.placement.safety import safety
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
    of_times.add_argument("--direct", action="store_true", help="the direct programs too")
    of_times.add_argument("--direct-limit", type=float, default=190.0, help="seconds for each of them")
    of_times.add_argument("--most", type=int, default=10, help="how many times OPT-175B at most")
    of_times.add_argument("--plot", type=Path)
    of_policies = commands.add_parser("policies")
    of_policies.add_argument("--instances", type=int, default=1000)
    of_policies.add_argument("--layers", type=int, default=20, help="most layers of a model")
    of_policies.add_argument("--alone-every", type=int, default=5, help="of instances, solved without policies too")
    of_prefixes = commands.add_parser("prefixes")
    of_prefixes.add_argument("--instances", type=int, default=2000)
    of_safety = commands.add_parser("safety")
    of_safety.add_argument("--count", type=int, default=10000)
    of_safety.add_argument("--every", type=int, default=5, help="of refusals, which are checked")
    of_safety.add_argument("--layers", type=int, default=5, help="most layers of a model")
    of_safety.add_argument("--first", type=int, default=0, help="number of the first instance")
    of_times.set_defaults(run=times)
    of_policies.set_defaults(run=compare_policies)
    of_prefixes.set_defaults(run=prefixes)
    of_safety.set_defaults(run=safety)
    options = parser.parse_args()
    start = time.perf_counter()
    rows = options.run(options)
    write_json(options.json, rows)
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}))
    print(table(rows))


if __name__ == "__main__":
    main()
