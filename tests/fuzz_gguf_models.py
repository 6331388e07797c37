"""Damaged GGUF files as models, each in a process with little memory and time.

    python tests/fuzz_gguf_models.py [--count 300] [--seed 0] [--compile]

A file must be refused in one line, or read to its end, tokenizer and tensors, within 5 seconds and 1 GiB beyond what
the libraries take. Exits with 1 where one is not. A process is a fork of this one, which has the libraries.

With `--compile` the whole command is run on each, `picompile compile`, with the same bounds. A file that is refused
must leave nothing behind, neither beside the artifact nor in the folder of temporary files; a file whose damage is
within its numbers makes an artifact, which may take longer.
"""

import argparse
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from helpers.attacks import command, import_once, refusal_fault, run_case
from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, byte_level_metadata, damaged, save_example
from picompile.errors import PicompileError
from picompile.frontend.gguf import open_gguf, read_gguf_tokenizer, read_header

BOUND_S = 5
BOUND_BYTES = 1 << 30
# For a whole compilation: of a file whose damage nobody can see.
COMPILED_S = 60
READ, REFUSED = "read", "refused"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="run picompile compile on each file")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import_once()
    examples = [
        (name, powerinfer) for powerinfer in (False, True) for name in (EXAMPLES, POWERINFER_EXAMPLES)[powerinfer]
    ]
    work = _compile if options.compile else _read
    wrong, refused, most_s = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, powerinfer) in enumerate(examples):
            file = save_example(Path(folder), name, "Q8_0", powerinfer, **byte_level_metadata())
            data, entries = file.read_bytes(), read_header(file).tensors.values()
            print(f"{name}{' of powerinfer' * powerinfer}: {_read(file)}")
            header_bytes, each = min(entry.offset for entry in entries), -(-options.count // len(examples))
            for what, changed in damaged(data, header_bytes, each, options.seed + number):
                file.write_bytes(changed)
                kind, line, fault, took_s = _judged(file, work)
                wrong, refused = wrong + (fault is not None), refused + (kind == REFUSED)
                most_s = max(most_s, took_s if kind == REFUSED or not options.compile else 0.0)
                if fault or options.verbose:
                    print(f"{took_s:5.2f} s  {name:18} {what:34} {fault or line or kind}")
    slowest = "them" if options.compile else "all"
    print(f"{refused} refused, the slowest of {slowest} in {most_s:.2f} s; {wrong} wrong")
    return int(wrong > 0)


def _judged(file: Path, work: Callable[[Path], str]) -> tuple[str, str, str | None, float]:
    """Do `work` on `file` in a fork with little memory: its outcome, what it said, its fault, and its seconds."""
    most_s = COMPILED_S if work is _compile else BOUND_S

    def case() -> str:
        with open("/proc/self/statm", encoding="ascii") as statm:
            mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + BOUND_BYTES, mapped_bytes + BOUND_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
        return work(file)

    ended = run_case(case, 4 * most_s)
    fault = None
    if ended.is_fault or not ended.detail.isprintable():
        fault = f"{ended.word}: {ended.detail[-600:]}"
    elif ended.seconds > (COMPILED_S if work is _compile and ended.word == READ else BOUND_S):
        fault = f"took {ended.seconds:.1f} s"
    return ended.word, ended.detail, fault, ended.seconds


def _read(file: Path) -> str:
    try:
        opened = open_gguf(file)
        read_gguf_tokenizer(opened.header)
        opened.fingerprint()
        for name in opened.tensors:
            opened.load(name)
            opened.packed(name, "q8")
    except PicompileError as error:
        return f"{REFUSED}\n{error}"
    return READ


def _compile(file: Path) -> str:
    """Compile `file` as the command does, in a folder that is looked at afterwards."""
    folder = file.with_name("compiled")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    tempfile.tempdir = str(folder / "tmp")
    words = ["compile", str(file), "-o", str(folder / "artifact"), "--context", "64"]
    code, _, said = command(words, file.parent).partition("\n")
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    left = [path for path in left if path != "tmp" and not (code == "0" and path.startswith("artifact"))]
    assert not left, f"left behind: {left}"
    if code == "0":
        return READ
    fault = refusal_fault(code, said)
    assert fault is None, f"{fault}: {said}"
    return f"{REFUSED}\n{said.strip()}"


if __name__ == "__main__":
    sys.exit(main())
