"""Damaged caches: what is built from them is the same, byte for byte, as what is built without.

    python tests/attack/caches.py [--number 300] [--seconds 600] [--seed 0]

A case damages some of the objects that a library was built of before: empty, torn, longer, with a flipped bit, of
another key, gone, or a folder in their place. The library built then must be the same. Likewise for what was measured
of a machine: it is read as it was, or not at all.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path


def damage(path: Path, others: list[Path], draw: random.Random) -> str:
    """Changes the file; says how."""
    content = bytearray(path.read_bytes())
    how = draw.choice(("empty", "torn", "longer", "flipped", "exchanged", "gone", "a folder"))
    if how == "empty":
        content.clear()
    elif how == "torn":
        del content[draw.randrange(len(content)) :]
    elif how == "longer":
        content += draw.randbytes(draw.randrange(1, 5000))
    elif how == "flipped":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "exchanged":
        content = bytearray(draw.choice(others).read_bytes())
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(content)
    return how


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

    def case(self, seed: int) -> str | None:
        """Runs one. What was wrong, None where nothing was."""
        draw = random.Random(seed)
        return self._measurement(draw) if draw.random() < 0.5 else self._objects(draw)

    def _objects(self, draw: random.Random) -> str | None:
        folder = self._work / "objects"
        shutil.rmtree(folder)
        shutil.copytree(self._work / "whole", folder)
        paths = sorted(folder.iterdir())
        hit = draw.sample(paths, draw.randint(1, len(paths)))
        told = [damage(path, sorted((self._work / "whole").iterdir()), draw) for path in hit]
        try:
            return None if self._build() == self._expected else f"another library after {told}"
        except Exception as error:
            return f"after {told}: {type(error).__name__}: {error}"

    def _measurement(self, draw: random.Random) -> str | None:
        from picompile.machine import measured as cache

        self._file.write_bytes(self._text)
        told = damage(self._file, [self._file], draw)
        found = cache.load(self._measured.machine, self._measured.no_gpu)
        if self._file.is_dir():
            self._file.rmdir()
        return None if found in (None, self._measured) else f"another measurement after {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    end, failures, done = time.monotonic() + options.seconds, 0, 0
    with tempfile.TemporaryDirectory() as name:
        caches = Caches(Path(name))
        while done < options.number and time.monotonic() < end:
            seed = options.seed + done
            wrong, done = caches.case(seed), done + 1
            if wrong is not None:
                failures += 1
                print(f"{wrong} (--number 1 --seed {seed})", flush=True)
    print(f"{done} cases from seed {options.seed}; {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
