"""A pack of kernels and models for a machine with a GPU, and what runs it there.

That machine has the repository, but none of our packages installed.
"""

import sys

from benchmarks import ROOT

# The module that `python -m` runs.
MODULE = "benchmarks.gpu"

sys.path += [str(ROOT / name) for name in ("runtime", "passes")]
