"""Run llama.cpp's tools/server/tests/unit against servers of ours, or against llama.cpp's own with the same model.

python tests/suites/run_llama.py --suite tools/server/tests --model FOLDER --artifacts FOLDER [--out FILE] [TEST …]
python tests/suites/run_llama.py --suite tools/server/tests --model FOLDER --llama-server PROGRAM [--out FILE] [TEST …]

The adapter is a program in the place of `llama-server` (llama_server.py), and a plugin of pytest (llama_plugin.py),
which writes llama.cpp's own endpoints as ours. What fails with llama.cpp's own server, too, fails for
want of the suite's model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
# Those of other programs, of other kinds of models, or of llama.cpp's own formats are left out: see README.md.
PORTABLE = (
    *("basic", "chat_completion", "compat_oai_responses", "completion", "ctx_shift", "ignore_eos", "metrics"),
    *("security", "stream", "template", "tokenize", "tool_call"),
)


def main() -> int:
    """Run the suite, and return 0 if no test failed but those that are expected to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    to_serve = parser.add_mutually_exclusive_group(required=True)
    to_serve.add_argument("--artifacts", type=Path)
    to_serve.add_argument("--llama-server", type=Path)
    parser.add_argument("--out", type=Path, default=Path("llama.md"))
    parser.add_argument("--port", default="18110")
    options, rest = parser.parse_known_args()
    if options.artifacts:
        options.artifacts.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_HERE}:{options.suite.resolve()}",
        "LLAMA_SERVER_BIN_PATH": str(_HERE / "llama_server.py"),
        "SUITE_MODEL": str(options.model.resolve()),
        "SUITE_ARTIFACTS": str((options.artifacts or Path()).resolve()),
        "SUITE_LLAMA_SERVER": str(options.llama_server.resolve()) if options.llama_server else "",
        "SUITE_OUT": str(options.out.resolve()),
        "PORT": options.port,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = rest or [f"unit/test_{name}.py" for name in PORTABLE]
    command = [sys.executable, "-m", "pytest", "-p", "llama_plugin", "-p", "no:cacheprovider", "-q", "--tb=short"]
    return subprocess.run([*command, "-m", "not slow", *tests], cwd=options.suite, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
