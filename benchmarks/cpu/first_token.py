"""Time from a command to the first token of a model, as a user has it.

    python -m benchmarks.cpu.first_token MODEL.gguf [--work build/first-token] [--rounds 3] [--json FILE]

Each case is measured in processes of its own, in seconds of wall time and of user time: for `picompile compile` and
`picompile run -n 1` after it, and for one process that compiles, loads and generates.

- nothing cached: no kernel is compiled yet, as after installing picompile;
- kernels cached: kernels are, but the structure of the model is not known, as for the first file of an architecture
  whose sizes another model has;
- structure known: the same file, or another of its structure, was compiled before;
- artifact there: `picompile run` alone.

The figures are medians of the rounds. Files of the model are in the page cache, and Python's files are compiled, after
a first round that is not counted.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.script import argument_parser, markdown, write_json
from picompile.compile.structure.key import structure_key
from picompile.config import CompileOptions

Seconds = tuple[float, float]

_ONE_PROCESS = """
import sys
from picompile.compile import compile_model
from picompile.config import CompileOptions
compile_model(sys.argv[1], sys.argv[2], CompileOptions(target=sys.argv[3]))
import picompile_runtime
engine = picompile_runtime.load(sys.argv[2])
tokenizer = picompile_runtime.Tokenizer.of(engine.artifact)
print(*picompile_runtime.generate(engine, tokenizer=tokenizer, prompt="Hello", max_tokens=1))
"""


def main() -> None:
    options = _arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = _Bench(options.model, options.work.absolute(), options.target)
    cases: dict[str, Callable[[], list[Seconds]]] = {
        "nothing cached": lambda: bench.both(bench.forget_all),
        "kernels cached": lambda: bench.both(bench.forget_structure),
        "structure known": lambda: bench.both(lambda: None),
        "artifact there": lambda: [bench.run()],
    }
    found: dict[str, list[list[Seconds]]] = {name: [] for name in cases}
    bench.both(lambda: None)
    for _ in range(options.rounds):
        for name, measure in cases.items():
            found[name].append(measure())
    columns = ("", "compile, then run: wall s", "user s", "one process: wall s", "user s")
    print(markdown(columns, [[name, *_medians(rounds)] for name, rounds in found.items()]))
    write_json(options.json, found)


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, "model", "--json", work=Path("build/first-token"), rounds=3, target="cpu")
    return parser.parse_args()


def _medians(rounds: Sequence[Sequence[Seconds]]) -> list[str]:
    ways = zip(*rounds, strict=True)
    cells = [f"{statistics.median(each):.2f}" for way in ways for each in zip(*way, strict=True)]
    return cells + [""] * (4 - len(cells))


class _Bench:
    """One model, compiled for `target` with a cache of its own in the folder `work`."""

    def __init__(self, model: Path, work: Path, target: str) -> None:
        self._model, self._target = model, target
        self._cache, self._artifact = work / "cache", work / "artifact"
        # Users have Python's compiled files, which pip makes.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self._environment = environment | {"PICOMPILE_CACHE": str(self._cache)}
        os.environ["PICOMPILE_CACHE"] = str(self._cache)

    def both(self, before: Callable[[], None]) -> list[Seconds]:
        """Return the times of two commands, and of one process, each after `before`."""
        return [self._in_two_commands(before), self._in_one_process(before)]

    def _in_two_commands(self, before: Callable[[], None]) -> Seconds:
        before()
        shutil.rmtree(self._artifact, ignore_errors=True)
        options = ("-o", self._artifact, "--target", self._target)
        compiled, ran = self._timed("-m", "picompile", "compile", self._model, *options), self.run()
        return compiled[0] + ran[0], compiled[1] + ran[1]

    def _in_one_process(self, before: Callable[[], None]) -> Seconds:
        before()
        shutil.rmtree(self._artifact, ignore_errors=True)
        return self._timed("-c", _ONE_PROCESS, self._model, self._artifact, self._target)

    def run(self) -> Seconds:
        """Return the time of `picompile run -n 1`."""
        return self._timed("-m", "picompile", "run", self._artifact, "-p", "Hello", "-n", 1)

    def forget_all(self) -> None:
        """Remove everything that is cached."""
        shutil.rmtree(self._cache, ignore_errors=True)

    def forget_structure(self) -> None:
        """Remove the structure of the model from the cache."""
        key = structure_key(self._model, CompileOptions(target=self._target))
        if key is None:
            sys.exit(f"{self._model}: no structure is kept of it")
        (self._cache / f"{key.key}.object").unlink(missing_ok=True)

    def _timed(self, *arguments: object) -> Seconds:
        """Run Python; return the wall time and the user time that it took."""
        command = [sys.executable, *map(str, arguments)]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
        ended = subprocess.run(command, env=self._environment, stdout=subprocess.DEVNULL, check=False)
        wall_s = time.perf_counter() - started
        if ended.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {ended.returncode}")
        return wall_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


if __name__ == "__main__":
    main()
