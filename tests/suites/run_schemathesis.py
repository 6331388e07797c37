"""Run schemathesis on our OpenAPI document, against a server of ours, for at least 10,000 requests.

python tests/suites/run_schemathesis.py --artifact ARTIFACT [--st st] [--requests 10000] [--seed 1]

An artifact with a context of 128 tokens keeps answers short. Fails on a status of 5xx, and on a response whose status,
content type or schema is not the document's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from serving import SERVER_PYTHON, serving

_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
_EXAMPLES = 400  # of each operation and run


def main() -> int:
    """Run schemathesis until there are enough requests, and return 0 if all were answered as the document says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--st", default="st", help="The command of schemathesis.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server-python", type=Path, default=SERVER_PYTHON)
    options = parser.parse_args()
    responses: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, serving(options.artifact, python=options.server_python) as url:
        counts = Path(folder, "responses.json")
        hooks = Path(__file__).with_name("schemathesis_hooks.py")
        environment = {
            **os.environ,
            "SCHEMATHESIS_HOOKS": str(hooks),
            "SUITE_RESPONSES": str(counts),
            "SUITE_MODEL": options.artifact.resolve().name,
        }
        seed = options.seed
        while responses.total() < options.requests:
            command = [options.st, "run", f"{url}/openapi.json", "--checks", _CHECKS, "--seed", str(seed)]
            command += ["--phases", "examples,coverage,fuzzing", "-n", str(_EXAMPLES), "--continue-on-failure"]
            code = subprocess.run([*command, "--request-timeout", "60"], cwd=folder, env=environment).returncode
            responses.update(json.loads(counts.read_text(encoding="utf-8")))
            if code:
                break
            seed += 1
    for name, count in sorted(responses.items()):
        print(f"{name}: {count}")
    print(f"{responses.total()} requests, seeds {options.seed} to {seed - (code == 0)}, exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
