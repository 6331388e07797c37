"""Damaged GGUF files as models, each in a process with little memory and time.

    python tests/fuzz_gguf_models.py [--count 300] [--seed 0] [--compile]

A file must be refused in one line, or read to its end, tokenizer and tensors, within 5 seconds and 1 GiB beyond what
the libraries take. Exits with 1 where one is not. A process is a fork of this one, which has the libraries.

With `--compile` the whole command is run on each, `picompile compile`, with the same bounds. A file that is refused
must leave nothing behind, neither beside the artifact nor in the folder of temporary files; a file whose damage is
within its numbers makes an artifact, which may take longer.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, build, byte_level_metadata, damaged, write_example
from picompile.cli import main as picompile
from picompile.errors import PicompileError
from picompile.frontend.gguf import open_gguf, read_gguf_tokenizer

BOUND_S = 5
BOUND_BYTES = 1 << 30
# For a whole compilation: of a file whose damage nobody can see.
COMPILED_S = 60
READ, REFUSED = "read", "refused"
# What a command of ours ends with where its input is wrong.
REFUSALS = (2, 3)


@dataclass(frozen=True)
class Outcome:
    """The result for one file: `fault` is None where it is as it must be, `said` the line of a refusal."""

    fault: str | None
    said: str
    took_s: float


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    wrong, refused, most_s = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.gguf"
        work = _compile if options.compile else _read
        wholes = _wholes(file, work)
        each = -(-options.count // len(wholes))
        for number, (title, data, header_bytes) in enumerate(wholes):
            for what, changed in damaged(data, header_bytes, each, options.seed + number):
                file.write_bytes(changed)
                outcome = _judged(file, work)
                wrong += outcome.fault is not None
                refused += bool(outcome.said)
                most_s = max(most_s, outcome.took_s if outcome.said or not options.compile else 0.0)
                if outcome.fault or options.verbose:
                    print(f"{outcome.took_s:5.2f} s  {title:18} {what:34} {outcome.fault or outcome.said or READ}")
    slowest = "them" if options.compile else "all"
    print(f"{refused} refused, the slowest of {slowest} in {most_s:.2f} s; {wrong} wrong")
    return int(wrong > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="run picompile compile on each file")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def _wholes(file: Path, work: Callable[[Path], str]) -> list[tuple[str, bytes, int]]:
    """Whole files with a name, and how long their headers are. Reading them imports what forks need."""
    found = []
    for title, examples in (("", EXAMPLES), ("powerinfer ", POWERINFER_EXAMPLES)):
        for name, example in examples.items():
            write_example(file, example, build(example), "Q8_0", **byte_level_metadata())
            opened = open_gguf(file)
            try:
                said = work(file)
            except PicompileError as error:
                said = str(error)
            print(f"{title}{name}: {said}")
            found.append((title + name, file.read_bytes(), min(e.offset for e in opened.header.tensors.values())))
    return found


def _judged(file: Path, work: Callable[[Path], str]) -> Outcome:
    """Do `work` on `file` in a fork; return what it said, and whether it kept to its bounds."""
    started_s = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(file, writer, work)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as opened:
        said = opened.read()
    _, status = os.waitpid(child, 0)
    took_s = time.monotonic() - started_s
    kind, _, line = said.partition(" ")
    fault = None
    if os.WIFSIGNALED(status):
        fault = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    elif kind not in (READ, REFUSED) or not line.isprintable():
        fault = f"not one line: {said[:600]}"
    elif took_s > (COMPILED_S if work is _compile and kind == READ else BOUND_S):
        fault = f"took {took_s:.1f} s"
    return Outcome(fault, line if kind == REFUSED else "", took_s)


def _run(file: Path, writer: int, work: Callable[[Path], str]) -> None:
    """Do `work` on `file` within the bounds, write what became of it, and end this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + BOUND_BYTES, mapped_bytes + BOUND_BYTES))
    most_s = COMPILED_S if work is _compile else BOUND_S
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    signal.alarm(4 * most_s)
    try:
        said = f"{READ} {work(file)}"
    except PicompileError as error:
        said = f"{REFUSED} {error}"
    except BaseException:
        said = traceback.format_exc()
    os.write(writer, said.encode(errors="replace")[:60_000])
    os._exit(0)


def _read(file: Path) -> str:
    opened = open_gguf(file)
    read_gguf_tokenizer(opened.header)
    opened.fingerprint()
    for name in opened.tensors:
        opened.load(name)
        opened.packed(name, "q8")
    return "to its end"


def _compile(file: Path) -> str:
    """Compile `file` as the command does, in a folder that is looked at afterwards."""
    folder = file.with_name("compiled")
    shutil.rmtree(folder, ignore_errors=True)
    scratch, words = folder / "tmp", file.with_name("words")
    scratch.mkdir(parents=True)
    tempfile.tempdir = str(scratch)
    streams = os.dup(1), os.dup(2)
    try:
        with words.open("wb") as opened:
            for stream in (1, 2):
                os.dup2(opened.fileno(), stream)
            code = picompile(["compile", str(file), "-o", str(folder / "artifact"), "--context", "64"])
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        tempfile.tempdir = None
    said = words.read_text(encoding="utf-8")
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path != scratch)
    if code == 0:
        left = [path for path in left if not path.startswith("artifact")]
        assert not left, f"left behind: {left}"
        return "and compiled"
    assert code in REFUSALS, f"exit code {code}: {said}"
    assert not left, f"left behind: {left}"
    # Without a terminal each step that was begun is a line of its own.
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert said.splitlines()[-1:] == lines, said
    raise PicompileError(lines[0])


if __name__ == "__main__":
    sys.exit(main())
