"""Damaged caches: what is built from them is the same, byte for byte, as what is built without.

    python tests/attack/caches.py [--number 300] [--seconds 600] [--seed 0]

A case damages some of the objects that a library was built of before: empty, torn, longer, with a flipped bit, of
another key, gone, or a folder in their place. The library built then must be the same. Likewise for what was measured
of a machine: it is read as it was, or not at all.
"""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import attack, damage_file, options


class Caches:
    """A cache with objects in it, the library that was built with them, and a measured machine."""

    def __init__(self, work: Path) -> None:
        from picompile.machine import measured as cache
        from picompile.machine.measured import measure_local

        self._work = work
        os.environ["PICOMPILE_CACHE"], os.environ["XDG_CACHE_HOME"] = "off", str(work / "xdg")
        self._expected = self._build()
        os.environ["PICOMPILE_CACHE"] = str(work / "objects")
        self._build()
        shutil.copytree(work / "objects", work / "whole")
        self._measured = measure_local()
        self._file = cache.cache_file()
        self._text = self._file.read_bytes()

    def _build(self) -> bytes:
        from picompile_codegen.build.host_library import build_host_library
        from picompile_codegen.cpu import write_kernel
        from picompile_codegen.specs import AddSpec

        path = self._work / "host.so"
        build_host_library([write_kernel(AddSpec(dim=64, rows=1)), write_kernel(AddSpec(dim=32, rows=1))], path)
        return path.read_bytes()

    def case(self, seed: int) -> tuple[str, str | None]:
        """Damage objects, or the measurement."""
        draw = random.Random(seed)
        what = draw.choice((self._measurement, self._objects))
        return what.__name__.strip("_"), what(draw)

    def _objects(self, draw: random.Random) -> str | None:
        folder = self._work / "objects"
        shutil.rmtree(folder)
        shutil.copytree(self._work / "whole", folder)
        paths, others = sorted(folder.iterdir()), sorted((self._work / "whole").iterdir())
        told = [damage_file(path, others, draw) for path in draw.sample(paths, draw.randint(1, len(paths)))]
        try:
            return None if self._build() == self._expected else f"another library after {told}"
        except Exception as error:
            return f"after {told}: {type(error).__name__}: {error}"

    def _measurement(self, draw: random.Random) -> str | None:
        from picompile.machine import measured as cache

        shutil.rmtree(self._file.parent)
        self._file.parent.mkdir()
        self._file.write_bytes(self._text)
        told = damage_file(self._file, [], draw)
        found = cache.load(self._measured.machine, self._measured.no_gpu)
        return None if found in (None, self._measured) else f"another measurement after {told}"


def main() -> int:
    found = options(__doc__, 300)
    with tempfile.TemporaryDirectory() as name:
        return 1 if attack(Caches(Path(name)).case, found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
