"""Where the processor's time goes, by test and by fixture.

PICOMPILE_TEST_TIMES=build/times make test-all; python tests/helpers/times.py build/times
"""

import argparse
import json
import os
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

FOLDER_VARIABLE = "PICOMPILE_TEST_TIMES"


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


class Times:
    """A plugin of pytest that writes a line of JSON for each test and fixture, to a file of each test process.

    A line is `["test", id, seconds, fixtures]`, with the fixtures that it shares with others, or
    `["fixture", name, seconds, id]`, with the test that it was made for. A test's seconds have those of its fixtures
    in them, a fixture's those of the fixtures that it asks for.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"times-{os.getpid()}.jsonl").open("a", encoding="utf-8")

    def _write(self, *fields: object) -> None:
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> object:
        """Measure a fixture."""
        before = processor_seconds()
        result = yield
        if (spent := processor_seconds() - before) > 0.02:
            self._write("fixture", fixturedef.argname, round(spent, 3), request.node.nodeid)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> object:
        """Measure a test."""
        before = processor_seconds()
        result = yield
        info = getattr(item, "_fixtureinfo", None)
        known = info.name2fixturedefs if info else {}
        own = {name: found[-1] for name, found in known.items() if not found[-1].func.__module__.startswith("_pytest")}
        # Those with an underscore are of all tests, and asked for by none.
        shared = [name for name, made in own.items() if made.scope != "function" and not name.startswith("_")]
        self._write("test", item.nodeid, round(processor_seconds() - before, 3), shared)
        return result


def read(folder: Path) -> Iterator[list]:
    """Yield the lines of all files."""
    for file in sorted(folder.glob("times-*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _print(title: str, seconds: Mapping[str, float], most: int) -> None:
    total = sum(seconds.values())
    print(f"{title}: {total:.0f} s in {len(seconds)}")
    for name, spent in sorted(seconds.items(), key=lambda each: -each[1])[:most]:
        print(f"{spent:8.1f} s {spent / total:6.1%}  {name}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=40)
    options = parser.parse_args()
    files, functions, fixtures = defaultdict(float), defaultdict(float), defaultdict(float)
    for kind, name, spent, _ in read(options.folder):
        if kind == "fixture":
            fixtures[name] += spent
            continue
        files[name.partition("::")[0]] += spent
        functions[name.partition("[")[0]] += spent
    for title, seconds in (("files", files), ("test functions", functions), ("fixtures", fixtures)):
        _print(title, seconds, options.most)


if __name__ == "__main__":
    main()
