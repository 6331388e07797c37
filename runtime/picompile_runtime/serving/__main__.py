"""`python -m picompile_runtime.serving ARTIFACT`: what `picompile-serve` does."""

import sys

from picompile_runtime.serving.main import main

if __name__ == "__main__":
    sys.exit(main())
