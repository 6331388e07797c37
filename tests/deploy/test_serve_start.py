"""benchmarks/serve_start.py runs, and finds that a server ends as it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.support import ROOT


def test_the_benchmark(artifact: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "serve_start.py"), str(artifact), "--rounds", "1"]
    ran = subprocess.run([*command, "--streams", "3", "--threads", "1"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["drained"] | {"s": 0} == {"streams": 3, "complete": 3, "exit_code": 0, "s": 0}
    for start in ("first_s", "warm_s", "cold_s", "restart_s"):
        assert 0 < found[start]["median"] <= found[start]["worst"]
