"""Peak memory of compiling, and whether a compilation stays inside a limit.

python -m benchmarks.cpu.compile_memory MODEL --quant q4 [--limit-gb 6]
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.common import watch
from benchmarks.script import argument_parser


def main() -> None:
    parser = argument_parser(__doc__, "model")
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--limit-gb", type=float, help="RLIMIT_AS of the process: all mapped memory, in GB")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="picompile-memory-", dir=options.model.resolve().parent))
    try:
        command = [sys.executable, "-m", "picompile", "compile", str(options.model), "-o", str(folder / "artifact")]
        limit = int(options.limit_gb * 1e9) if options.limit_gb else None
        result = watch([*command, "--quant", options.quant], limit)
    finally:
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "returncode": result.returncode,
                "seconds": round(result.seconds, 1),
                "peak_anonymous_bytes": result.anonymous_bytes,
                "peak_resident_bytes": result.resident_bytes,
                "limit_bytes": limit,
            }
        )
    )
    sys.exit(result.returncode)


if __name__ == "__main__":
    main()
