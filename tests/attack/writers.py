"""Kills commands that write at random moments: what is there is old or new, whole, and the next command tidies up.

    python tests/attack/writers.py [--number 100] [--seconds 900] [--seed 0] [--commands compile,synth]

A case draws a command, whether its output is new or replaces an older one (`--overwrite`), a signal, and a moment. A
command that goes on with what it began can be killed several times. After the kill, the output must be what it was
before, or what the command makes undisturbed, byte for byte; or, for `profile` and `train`, which go on with what they
began, an output that no reader takes for one. Asked to stop, the process must end with 128 plus the signal's number and
leave nothing but that; killed outright, it may leave hidden files, which the same command or another one beside it must
remove. No process that it started may live on.
"""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import attack, import_once, options, run_case
from helpers.digests import digests

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# A process that was killed outright needs a moment until its own children are gone.
_GONE_S = 5.0
_LIMIT_S = 120.0
_POLL_S = 0.002


@dataclass(frozen=True)
class Command:
    """A command, `OUT` among its words for the output; `older` makes what `--overwrite` replaces.

    `public` says which files, relative to the output, a reader looks at; `goes_on` whether an output may be unfinished.
    """

    words: tuple[str, ...]
    older: tuple[str, ...]
    public: Callable[[str], bool] = lambda name: True
    goes_on: bool = False
    force: bool = True

    def seen(self, files: dict[str, str]) -> dict[str, str]:
        """Return those of the `files` that a reader looks at."""
        return {name: digest for name, digest in files.items() if self.public(name)}


@dataclass(frozen=True)
class Reference:
    """The output of a command that is not disturbed, what it replaces, and how long it takes."""

    older: Path
    new: dict[str, str]
    seconds: float


def commands(work: Path) -> dict[str, Command]:
    """Return the commands to attack, on the models in `work`."""
    model, text = str(work / "model"), str(work / "text.txt")
    compile_ = ("compile", model, "-o", "OUT", "--context", "64", "--target", "native")
    profile = ("profile", model, "-o", "OUT", "--calibration", text, "--window", "128", "--samples", "200")
    profiled = ("train", model, "--profile", str(work / "profile"), "-o", "OUT")
    train = (*profiled, "--accuracy-bound", "off", "--budget", "100%", "--no-exact")
    return {
        "compile": Command((*compile_, "--quant", "q4"), (*compile_, "--quant", "f16")),
        "profile": Command(profile, (*profile, "--seed", "1"), lambda name: not _is_hidden(name), goes_on=True),
        "train": _train(train, "1"),
        "workers": _train(train, "2"),
        "synth": Command(("synth", "--shape", "tiny-reglu", "-o", "OUT"), (), force=False),
    }


def _train(words: tuple[str, ...], jobs: str) -> Command:
    """Training by this process, or by several."""
    new, older = (*words, "--rank", "8", "--jobs", jobs), (*words, "--rank", "16", "--jobs", "1")
    return Command(new, older, lambda name: "/" not in name, goes_on=True)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name or name in ("state.safetensors", "search.json")


class Attack:
    """The models, the references of commands as they are needed, and the cases."""

    def __init__(self, work: Path, chosen: list[str]) -> None:
        self._work = work
        self.commands = {name: command for name, command in commands(work).items() if name in chosen}
        self._references: dict[str, Reference] = {}
        make_inputs(work, with_profile=bool({"train", "workers"} & {*chosen}))

    def case(self, seed: int) -> tuple[str, str | None]:
        """Kill a command, and run it or another one again."""
        draw = random.Random(seed)
        name = draw.choice(list(self.commands))
        command, reference = self.commands[name], self.reference(name)
        replaces, number = command.force and draw.random() < 0.5, draw.choice(SIGNALS)
        elsewhere, moment_s = draw.random() < 0.3, draw.uniform(0.0, 1.05 * reference.seconds)
        times = draw.choice((1, 1, 1, 4)) if command.goes_on else 1
        told = f"{name}{' --overwrite' * replaces}, {times} times {number.name} after {moment_s:.3f} s"
        case = fresh_case(self._work / "case")
        output = case / "outputs" / "out"
        if replaces:
            shutil.copytree(reference.older, output)
        before = digests(output)
        for _ in range(times):
            code = run_command([*self.words(command, output), *["--overwrite"] * replaces], case, moment_s, number)
        way = f"{name}{' --overwrite' * replaces} {number.name if code in (-number, 128 + number) else 'ended before'}"
        # Asked to stop, a command that had not ended says so; before it can, the signal itself ends the process.
        wrong = (
            self.state(command, reference, output, before)
            or (None if code in (0, 128 + number, -number) else f"it ended with {code}")
            or (None if number == signal.SIGKILL else left_behind(case))
            or self._next(command, reference, output, elsewhere, replaces)
        )
        return way, None if wrong is None else f"{told}: {wrong}"

    def state(self, command: Command, reference: Reference, output: Path, before: dict[str, str]) -> str | None:
        """Return the fault in the output, which had the content `before`; None if there is none."""
        seen = command.seen(digests(output))
        if seen in (command.seen(before), command.seen(reference.new)) or (not before and not output.exists()):
            return None
        if command.goes_on and not before and not is_complete(output):
            return None
        return f"the output is neither old nor new: {sorted(seen)}"

    def _next(
        self, command: Command, reference: Reference, output: Path, elsewhere: bool, replaces: bool
    ) -> str | None:
        """Another command in the same folder, or the same once more."""
        case = output.parents[1]
        if elsewhere:
            plan = ("plan", "--shape", "opt-6.7b", "--firing", "opt", "--target", "4090")
            code = run_command([*plan, "-o", str(output.with_name("plan.json"))], case)
            output.with_name("plan.json").unlink(missing_ok=True)
            return f"plan ended with {code}" if code else left_behind(case, but_temporary=True)
        again = [*self.words(command, output), *["--overwrite"] * replaces]
        is_there = not command.goes_on and not replaces and output.exists()
        code = run_command(again, case)
        if code != (2 if is_there else 0):
            return f"the same command then ended with {code}: {(case / 'output.txt').read_text()[-300:]}"
        if (now := command.seen(digests(output))) != command.seen(reference.new):
            return f"the same command then made something else: {sorted(now)}"
        return left_behind(case, but_temporary=is_there)

    def reference(self, name: str) -> Reference:
        if name not in self._references:
            command, folder = self.commands[name], fresh_case(self._work / name)
            for words, place in ((command.older, "older"), (command.words, "new")):
                began = time.monotonic()
                output = folder / "outputs" / place
                if words:
                    _must(words, output, folder)
            seconds = time.monotonic() - began
            self._references[name] = Reference(folder / "outputs" / "older", digests(output), seconds)
        return self._references[name]

    def words(self, command: Command, output: Path) -> list[str]:
        return [str(output) if word == "OUT" else word for word in command.words]


def is_complete(output: Path) -> bool:
    """Whether a reader takes what is there for a profile, or for predictors."""
    from picompile.errors import UsageError
    from picompile.predictors.files import load_predictors
    from picompile.predictors.profile.profile import load_profile

    for load in (load_profile, load_predictors):
        try:
            load(output)
            return True
        except UsageError:
            pass
    return False


def fresh_case(case: Path) -> Path:
    """Make an empty folder with one for outputs and one for temporary files."""
    shutil.rmtree(case, ignore_errors=True)
    (case / "outputs").mkdir(parents=True)
    (case / "tmp").mkdir()
    return case


def left_behind(case: Path, but_temporary: bool = False) -> str | None:
    """Return which files are left beside the output or among temporary files; None if there are none."""
    names = [path.name for path in (case / "outputs").iterdir() if path.name != "out"]
    if not but_temporary:
        names += [f"tmp/{path.name}" for path in (case / "tmp").iterdir()]
    return f"left behind: {', '.join(sorted(names))}" if names else None


def run_command(
    words: list[str], case: Path, kill_after_s: float | None = None, number: int = 0, most_bytes: int | None = None
) -> int:
    """Run a command in a forked process, killed so long after it began; its exit code, or minus a signal's number.

    No file that it writes can have more than `most_bytes`. Returns -1000 where something that it started lives on.
    """
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        _become(words, case, begun, most_bytes)
    os.close(begun)
    os.read(ready, 1)
    os.close(ready)
    end = time.monotonic() + (_LIMIT_S if kill_after_s is None else kill_after_s)
    status = None
    while status is None and time.monotonic() < end:
        pid, found = os.waitpid(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(_POLL_S)
    if status is None:
        os.kill(child, number or signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if _all_gone(child) else -1000


def _become(words: list[str], case: Path, begun: int, most_bytes: int | None) -> None:
    """In a child: the command, in a session of its own."""
    code = 1
    try:
        os.setsid()
        os.environ["TMPDIR"], tempfile.tempdir = str(case / "tmp"), None
        output = os.open(case / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from picompile.cli import main

        # As a shell starts it: this process may have been started in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(begun, b"x")
        os.close(begun)
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        code = main(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        # Before the command has its own way to end, or after.
        code = 128 + signal.SIGINT
    finally:
        os._exit(code)


def _all_gone(session: int) -> bool:
    """Whether no process of the session is left, or will be in a moment."""
    end = time.monotonic() + _GONE_S
    while members := _members(session):
        if time.monotonic() > end:
            for process in members:
                os.kill(process, signal.SIGKILL)
            return False
        time.sleep(_POLL_S)
    return True


def _members(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name may hold anything, even brackets.
            state, _, _, of_session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(of_session) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def make_inputs(work: Path, with_profile: bool) -> None:
    """The model and the text. In a child: torch's threads would not outlive a fork."""

    def make() -> str:
        from helpers.support import ROOT, save_tiny_llama

        save_tiny_llama(work / "model")
        text = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
        # Enough for a few windows: training shall not take long.
        (work / "text.txt").write_text(text[:3000])
        return "made"

    made = run_case(make, _LIMIT_S)
    if made.word != "made":
        raise RuntimeError(f"the model could not be made: {made.detail}")
    if with_profile:
        (work / "tmp").mkdir()
        _must(commands(work)["profile"].words, work / "profile", work)


def _must(words: Sequence[str], output: Path, folder: Path) -> None:
    """Run a command that has to end well."""
    if code := run_command([str(output) if word == "OUT" else word for word in words], folder):
        raise RuntimeError(f"{words[0]} ended with {code}: {(folder / 'output.txt').read_text()[-500:]}")


def main() -> int:
    found = options(__doc__, 100, commands="compile,profile,train,workers,synth")
    import_once()
    with tempfile.TemporaryDirectory() as name:
        writers = Attack(Path(name), found.commands.split(","))
        return 1 if attack(writers.case, found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
