"""Print constraints.txt: the versions of all packages that are installed beside this Python, but for our own.

A version that does not install on the oldest Python that we support gets a marker: older Pythons then take the newest
version that they can.
"""

from importlib.metadata import Distribution, distributions

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

OLDEST = "3.10"
NEWER = ("3.11", "3.12", "3.13")
# Each environment brings its installer with it. torch's build for GPUs wants another major version of cuda-bindings
# than the dev extra: pinned, it would keep `make demo` from installing where torch's build for CPUs cannot be had.
NOT_PINNED = ("cuda-bindings", "cuda-pathfinder", "pip", "setuptools", "wheel")

HEAD = """\
# The versions that development environments are made of; the Makefile installs with `-c constraints.txt`.
# `make constraints` renews this file: it installs what pyproject.toml asks for, in the newest versions, into an empty
# environment, and writes down what came. Nobody edits it. `make test CONSTRAINTS=` takes the newest versions instead.
# torch's build for GPUs brings packages (nvidia-*, triton) that are not pinned here: this is the list of its CPU build.
"""


def pin(distribution: Distribution) -> str:
    """Return the line for one package, without the local part of its version (`+cpu`), which not every index has."""
    version = Version(distribution.version).public
    line = f"{canonicalize_name(distribution.metadata['Name'])}=={version}"
    pythons = SpecifierSet(distribution.metadata.get("Requires-Python") or "")
    if pythons.contains(f"{OLDEST}.99"):
        return line
    first = next(python for python in NEWER if pythons.contains(f"{python}.99"))
    return f'{line} ; python_version >= "{first}"'


def main() -> None:
    """Print the file."""
    found = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}
    print(HEAD, end="")
    for name, distribution in sorted(found.items()):
        if not (name in NOT_PINNED or name.startswith("picompile")):
            print(pin(distribution))


if __name__ == "__main__":
    main()
