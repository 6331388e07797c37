"""`python -m picompile_server ARTIFACT`: what `picompile-serve` does."""

import sys

from picompile_server.main import main

if __name__ == "__main__":
    sys.exit(main())
