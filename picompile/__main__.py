"""`python -m picompile` is the `picompile` command."""

import sys

from picompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
