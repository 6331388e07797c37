"""The frame of all attacks: cases until their number or time is up, children for cases that may crash, and damage."""

import argparse
import importlib
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------------------------------ many cases


@dataclass
class Report:
    """The outcomes of all cases: how many ended in which way, and a line for each wrong one."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


# One case: (seed) → how it ended, and what was wrong, None where nothing was.
Case = Callable[[int], tuple[str, str | None]]


def attack(case: Case, number: int | None, seconds: float | None, seed: int) -> Report:
    """Run cases of seeds in a row. Print a line for each failure, with what repeats it, and a summary."""
    report, done, started = Report(), 0, time.monotonic()
    while (number is None or done < number) and (seconds is None or time.monotonic() < started + seconds):
        way, wrong = case(seed + done)
        report.ended[way] += 1
        if wrong is not None:
            report.failures.append(f"{wrong} (repeat with --number 1 --seed {seed + done})")
            print(report.failures[-1], flush=True)
        done += 1
    ways = ", ".join(f"{count} {way}" for way, count in sorted(report.ended.items()))
    print(f"{done} cases from seed {seed}: {ways}; {len(report.failures)} failures", flush=True)
    return report


def options(description: str | None, number: int, **more: Any) -> argparse.Namespace:
    """Read `--number`, `--seconds` and `--seed`, and options with the defaults `more`; False makes a flag.

    If only seconds are given, they are the only bound.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    for name, default in more.items():
        parser.add_argument(f"--{name}", **({"action": "store_true"} if default is False else {"default": default}))
    found = parser.parse_args()
    if found.number is None and found.seconds is None:
        found.number = number
    return found


# -------------------------------------------------------------------------------------------------------- children


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `word` is what it returned, or "signal", "hang" or "internal error" with `detail`."""

    word: str
    detail: str
    seconds: float
    processor_s: float
    peak_bytes: int

    @property
    def is_fault(self) -> bool:
        return self.word in ("signal", "hang", "internal error")


def run_case(case: Callable[[], str], limit_s: float) -> Outcome:
    """Run `case` in a forked child for at most `limit_s` seconds, so that a crash or a hang is an outcome like others.

    The case returns a word and, behind a newline, details.
    """
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_and_exit(case, reader, writer)
    os.close(writer)
    text, hung = _read(reader, began + limit_s)
    os.close(reader)
    if hung:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    word, _, detail = text.partition("\n")
    if hung:
        word, detail = "hang", f"beyond {limit_s:g} s"
    elif os.WIFSIGNALED(status):
        word, detail = "signal", signal.Signals(os.WTERMSIG(status)).name
    elif os.waitstatus_to_exitcode(status) != 0 or not text:
        word, detail = "internal error", text or f"exit code {os.waitstatus_to_exitcode(status)}"
    seconds = time.monotonic() - began
    return Outcome(word, detail, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss << 10)


def _run_and_exit(case: Callable[[], str], reader: int, writer: int) -> None:
    code = 1
    try:
        os.setsid()
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        text, code = case(), 0
    except BaseException:
        text = traceback.format_exc()[-2000:]
    os.write(writer, text.encode(errors="replace")[:60_000])
    os._exit(code)


def _read(reader: int, end: float) -> tuple[str, bool]:
    """Return all that comes before the pipe is closed, and whether time was up first."""
    found = b""
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 65536)
        if not part:
            return found.decode(errors="replace"), False
        found += part
    return found.decode(errors="replace"), True


def import_once() -> None:
    """Import what commands need for seconds. Nothing is computed here: torch's threads would not outlive a fork."""
    for name in (
        *("transformers.models.llama.modeling_llama", "picompile.cli.app", "picompile.compile"),
        *("picompile.placement.planning", "picompile.predictors.profile.run", "picompile_codegen.lowering.lower"),
        "picompile_codegen.build.host_library",
    ):
        importlib.import_module(name)
    sys.modules["transformers"].utils.logging.disable_progress_bar()


def command(words: Sequence[str], folder: Path) -> str:
    """Run `picompile` with `words` in this process, whose streams become files in `folder`: a case for `run_case`.

    Returns the exit code and, behind a newline, the text on stderr.
    """
    from picompile.cli import main

    said = folder / "stderr.txt"
    for number, path in ((1, folder / "stdout.txt"), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    code = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    return f"{code}\n{said.read_text(errors='replace')}"


def refusal_fault(code: int | str, said: str, codes: Sequence[int] = (2, 3)) -> str | None:
    """Return the fault in a command's refusal of its input; None if it ends with one line and one of `codes`."""
    if str(code) not in map(str, codes):
        return f"ended with {code}"
    if not said.startswith("error: ") or said.count("\n") != 1 or not said.strip().isprintable():
        return "is not refused in one line"
    return "says internal error" if "internal error" in said else None


# ---------------------------------------------------------------------------------------------------------- damage


def damage_file(path: Path, others: Sequence[Path], draw: random.Random) -> str:
    """Change the bytes, the length or the kind of a file, or give it the bytes of another; return what was done.

    The file is replaced, never written to, since it may be a link to one that stays as it is.
    """
    content = bytearray(path.read_bytes())
    ways = ("empty", "torn", "longer", "inserted", "exchanged", "gone", "a folder", "a link")
    how = draw.choice((*ways, "flipped", "flipped", "flipped", "set") if content else ways)
    at = draw.randrange(len(content)) if content else 0
    if how == "empty":
        content = content[:0] if content else bytearray(b"\0")
    elif how == "torn":
        content = content[:at] if content else bytearray(b" ")
    elif how == "longer":
        content += draw.choice((b" ", b"\n", b"\0", draw.randbytes(draw.randrange(1, 5000))))
    elif how == "inserted":
        content[at:at] = draw.choice((b" ", b"0", b"\0" * 64))
    elif how == "flipped":
        content[at] ^= 1 << draw.randrange(8)
    elif how == "set":
        content[at : at + draw.choice((1, 8, 512))] = bytes(byte ^ draw.randrange(1, 256) for byte in content[at:][:8])
    elif how == "exchanged":
        different = [other for other in others if other.is_file() and other.read_bytes() != content]
        content = bytearray(draw.choice(different).read_bytes()) if different else content + b"\0"
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    if how == "a folder":
        path.mkdir()
    elif how == "a link":  # to other content: links are followed
        kept.unlink()
        kept.write_bytes(content + b"\0")
        path.symlink_to(kept.name)
        return f"{path.name} {how}"
    elif how != "gone":
        path.write_bytes(content)
    kept.unlink()
    return f"{path.name} {how}"
