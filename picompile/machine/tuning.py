"""The distance at which kernels should prefetch on this machine, and into which cache: measured once, and kept as JSON.

Processors differ in what they prefetch by themselves and in how many lines they can wait for, so that a kernel may be
twice as fast with another `Prefetching`, to the same bits. Each choice is measured by a kernel that depends on it, with
weights that are in no cache; the kernels of all choices take turns, because a machine's memory is not equally fast at
all times. The fastest takes the place of the default if it is faster in three of four rounds, and again in new ones.
The cache into which rows are prefetched is chosen where rows are scattered, and stays if it is not slower elsewhere.

A file counts as missing if it is damaged, which the sha256 of its content shows, or if it is of another version or
another machine. A file that cannot be written only costs the time to measure again.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from picompile.machine.host import host_memory
from picompile.machine.kept import cache_folder, digest, keep, read_kept
from picompile.progress import Progress
from picompile_runtime import ArtifactError
from picompile_runtime.artifact.fields import Fields

if TYPE_CHECKING:
    from picompile.machine.kernel_calls import Arguments
    from picompile_codegen.build.isa import Isa
    from picompile_codegen.cpu import Kernel
    from picompile_codegen.specs import KernelSpec

# Increased when kernels prefetch in another way, or it is measured in another way.
_SCHEMA = 2
# All calls of a kernel together read so much: several times the third-level cache of most processors, and at most one
# part in so many of the memory.
_WORKING_SET_BYTES = 192 * 2**20
_WORKING_SET_SHARE = 8
# Each race takes so long, and has so many rounds at least; by so much a choice must be faster.
_SECONDS, _ROUNDS = 4.0, 15
_LEAST_GAIN = 1.03
# Neurons that a token computes, one of so many.
_FIRING = 10

# Fields of `Prefetching`.
Choice = Mapping[str, Any]
_ROWS_LEVEL = "rows_into_first_level"


@dataclass(frozen=True)
class PrefetchTrial:
    """A choice that was tried in a kernel. `speed` is a multiple of another choice's, in the median of rounds; in a
    quarter of the rounds it was below `low`. The other is the default, but where `kernel` is `rows, chosen level`."""

    kernel: str
    choice: Choice
    speed: float
    low: float

    @property
    def is_faster(self) -> bool:
        """Whether this was faster than the other by enough, and in three of four rounds."""
        return self.low > 1 and self.speed > _LEAST_GAIN


@dataclass(frozen=True)
class Tuning:
    """The measurements of a processor, and the `choice`: what differs from the default."""

    isa: str
    machine: Mapping[str, Any]
    trials: tuple[PrefetchTrial, ...]
    choice: Choice

    def apply(self, isa: "Isa") -> "Isa":
        """Return `isa` with the prefetching that was chosen."""
        return replace(isa, prefetching=replace(isa.prefetching, **self.choice))

    def to_json(self) -> dict[str, Any]:
        """Return what the artifact's report says."""
        return {
            "isa": self.isa,
            "processor": self.machine["processor"],
            "threads": self.machine["threads"],
            "choice": dict(self.choice),
            "trials": [asdict(trial) for trial in self.trials],
        }


def tuned(isa: "Isa", threads: int, progress: Progress) -> Tuning:
    """Return the tuning of `isa`, which this machine has, for `threads` threads here.

    Measuring takes half a minute to a minute, and is done once for a machine. Raises `BuildError` as compiling does.
    """
    machine = {"processor": processor(), "threads": threads}
    tuning = load(isa, machine)
    if tuning is None:
        tuning = measure(isa, machine, progress)
        progress.say(f"tuned {isa.name}: {choice_text(tuning.choice)}")
        store(tuning, isa)
    return tuning


def processor() -> str:
    """Return the processor's name, and family, model and stepping: machines in a cloud often have the same name."""
    wanted = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU revision")
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    known = [(name, found[name]) for name in wanted if name in found]
    return ", ".join(value if name == "model name" else f"{name} {value}" for name, value in known) or "unknown"


def choice_text(choice: Choice) -> str:
    """Return a choice in words."""
    chosen = (f"{name.replace('_', ' ')} {value}" for name, value in choice.items())
    return ", ".join(chosen) or "the defaults are best"


# The file.


def tuning_file(isa: str, machine: Mapping[str, Any]) -> Path:
    """Return the file with the tuning of `isa` on `machine`. Raise `RuntimeError` if this user has no home folder."""
    return cache_folder() / f"tuning-{isa}-{digest(machine)[:12]}.json"


def load(isa: "Isa", machine: Mapping[str, Any]) -> Tuning | None:
    """Return the tuning kept of `isa` on `machine`, None without any."""
    with suppress(OSError, RuntimeError, ArtifactError, KeyError, TypeError, ValueError):
        # Speeds are multiples of those of the default, and a choice differs from it.
        expected = {"schema": _SCHEMA, "machine": machine, "default": asdict(isa.prefetching)}
        fields = read_kept(tuning_file(isa.name, machine), expected)
        trials = tuple(_trial(each) for each in fields.objects("trials"))
        return Tuning(isa.name, machine, trials, _known(fields.object("choice").data, isa))
    return None


def _trial(fields: Fields) -> PrefetchTrial:
    choice = dict(fields.object("choice").data)
    return PrefetchTrial(fields.text("kernel"), choice, float(fields.data["speed"]), float(fields.data["low"]))


def _known(choice: Mapping[str, Any], isa: "Isa") -> Choice:
    """Return `choice`. Raise `ValueError` unless it is one of a `Prefetching`."""
    for name, value in choice.items():
        if type(value) is not type(getattr(isa.prefetching, name, None)) or (type(value) is int and value < 1):
            raise ValueError(name)
    return dict(choice)


def store(tuning: Tuning, isa: "Isa") -> None:
    """Replace the file by `tuning` of `isa`; another process that reads it sees the old or the new content."""
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "machine": dict(tuning.machine),
        "default": asdict(isa.prefetching),
        "choice": dict(tuning.choice),
        "trials": [asdict(trial) for trial in tuning.trials],
    }
    with suppress(RuntimeError):
        keep(tuning_file(tuning.isa, tuning.machine), content)


# Measuring.


@dataclass(frozen=True)
class _Question:
    """A kernel that tells choices apart, the first of which is the default; `copied` are the arguments that it reads
    from memory, and one of `share` of them is read by a call. Its token is at `position`."""

    name: str
    spec: "KernelSpec"
    choices: Sequence[Choice]
    copied: tuple[str, ...]
    share: int = 1
    position: int = 0


def questions(isa: "Isa") -> list[_Question]:
    """Return what is to be measured for `isa`."""
    from picompile_codegen.specs import AttentionSpec, FfnSpec, LinearSpec

    default = isa.prefetching
    attention = AttentionSpec(
        heads=32, kv_heads=32, head_dim=64, value_dim=64, context=1024, rows=1, kv_dtype="float16", scale=0.125,
        window=0, mode="one", sequences=1, extend=True, turn=True,
    )  # fmt: skip
    block = FfnSpec(
        kind="masked", format="q4", neurons=5632, dim=2048, rows=1, gated=True, activation="relu",
        up_activation="identity", gate_bias=True, up_bias=True, down_bias=False,
    )  # fmt: skip
    levels = (default.rows_into_first_level, not default.rows_into_first_level)
    return [
        _Question(
            "panels",
            LinearSpec(format="q4", n=2048, k=2048, rows=1, bias=False, panels=True),
            _choices(default, "panels_into_first_level", not default.panels_into_first_level),
            ("w.data",),
        ),
        _Question(
            "caches",
            attention,
            _choices(default, "caches_into_first_level", not default.caches_into_first_level),
            ("k_cache", "v_cache"),
            position=attention.context - 1,
        ),
        _Question(
            "scattered rows",
            block,
            [
                {_ROWS_LEVEL: level, "scattered_bytes_ahead": ahead}
                for level, ahead in product(levels, _distances(default.scattered_bytes_ahead))
            ],
            ("neuron_w.data",),
            _FIRING,
        ),
        replace(_rows([{"row_bytes_ahead": ahead} for ahead in _distances(default.row_bytes_ahead)]), name="rows"),
    ]


def _rows(choices: Sequence[Choice]) -> _Question:
    """Return the question which of `choices` is best where rows follow one another."""
    from picompile_codegen.specs import LinearSpec

    spec = LinearSpec(format="f16", n=2048, k=2048, rows=1, bias=False)
    return _Question("rows, chosen level", spec, choices, ("w.data",))


def _choices(default: Any, name: str, *others: bool | int) -> list[Choice]:
    return [{name: value} for value in (getattr(default, name), *others)]


def _distances(default: int) -> tuple[int, ...]:
    return default, default // 2, default * 2


def measure(isa: "Isa", machine: Mapping[str, Any], progress: Progress) -> Tuning:
    """Measure all choices for `isa`, which this machine has. Raises `BuildError` as compiling does."""
    asked, trials, choice = questions(isa), list[PrefetchTrial](), dict[str, Any]()
    steps = sum(len(question.choices) for question in asked)
    with progress.step(f"tune {isa.name}", steps) as advance, tempfile.TemporaryDirectory() as folder:
        for question in asked:
            race = _Race(question, isa, machine["threads"], Path(folder))
            advance(len(question.choices))
            found = race.run()
            best = max(found, key=lambda trial: trial.speed)
            # The fastest of several may have been lucky: it must win again, alone.
            confirmed = race.run([best]) if best.is_faster else []
            trials += [*found, *confirmed]
            if not all(trial.is_faster for trial in (best, *confirmed)):
                continue
            first = question.choices[0]
            changed = {name: value for name, value in best.choice.items() if value != first[name]}
            if _ROWS_LEVEL in changed:
                rows = _Race(_rows((best.choice, first)), isa, machine["threads"], Path(folder)).run()
                trials += rows
                if rows[0].is_faster:
                    continue
            choice |= changed
    return Tuning(isa.name, machine, tuple(trials), choice)


class _Race:
    """The kernels of a question, one for each choice, which take turns."""

    def __init__(self, question: _Question, isa: "Isa", threads: int, folder: Path) -> None:
        from picompile.machine.kernel_calls import KernelCalls
        from picompile_codegen import cpu
        from picompile_codegen.build.host_library import build_host_library
        from picompile_codegen.build.isa import targeting

        self._question, self._threads = question, threads
        self._calls: list[KernelCalls] = []
        arguments: list[Arguments] = []
        for number, choice in enumerate(question.choices):
            chosen = replace(isa, prefetching=replace(isa.prefetching, **choice))
            with targeting(chosen):
                kernel = cpu.write_kernel(question.spec)
            path = folder / f"{question.name.replace(' ', '-')}-{number}.so"
            build_host_library([kernel], path, chosen)
            arguments = arguments or _arguments(question, kernel)
            self._calls.append(KernelCalls(path, kernel, arguments))

    def run(self, trials: Sequence[PrefetchTrial] | None = None) -> list[PrefetchTrial]:
        """Return how fast each choice but the first is, as a multiple of the first; or only those of `trials`."""
        wanted = self._question.choices[1:] if trials is None else [trial.choice for trial in trials]
        chosen = [self._question.choices[0], *wanted]
        calls = [self._calls[self._question.choices.index(choice)] for choice in chosen]
        rows: list[list[float]] = []
        end = time.perf_counter() + _SECONDS
        for each in calls:  # pages are mapped, and code is loaded
            each.seconds(self._threads)
        while len(rows) < _ROUNDS or time.perf_counter() < end:
            order = [(len(rows) + number) % len(calls) for number in range(len(calls))]
            times = {index: float(np.median(calls[index].seconds(self._threads))) for index in order}
            rows.append([times[index] for index in range(len(calls))])
        return trials_of(self._question.name, chosen, np.array(rows))


def trials_of(kernel: str, choices: Sequence[Choice], seconds: NDArray[np.float64]) -> list[PrefetchTrial]:
    """Return how fast each choice but the first is, given the time of each in each round [rounds, choices]."""
    speeds = seconds[:, :1] / seconds[:, 1:]
    return [
        PrefetchTrial(kernel, choice, float(np.median(column)), float(np.quantile(column, 0.25)))
        for choice, column in zip(choices[1:], speeds.T, strict=True)
    ]


def _arguments(question: _Question, kernel: "Kernel") -> "list[Arguments]":
    """Return the arguments of calls that together read the working set."""
    from picompile.machine.kernel_calls import copied_arguments, fill_with_bytes
    from picompile_codegen.lowering.program import tensor_bytes

    rng = np.random.default_rng(0)
    sizes = {each.name: tensor_bytes(each.dtype, each.shape) for each in kernel.arguments}
    room = min(_WORKING_SET_BYTES, host_memory()[1] // _WORKING_SET_SHARE)
    copies = max(1, room // sum(sizes[name] for name in question.copied))

    def fill(name: str, array: Any) -> None:
        if name in question.copied:
            fill_with_bytes(array, rng)
        elif name in ("gate_bias", "up_bias"):
            array[:] = 1.0  # x is zero: all neurons that are computed fire, and rows of down are read
        elif name == "step":
            array[:2] = 1, question.position

    found = list(copied_arguments(kernel, fill, question.copied, copies))
    if question.share == 1:
        return found
    masks = _masks(found[0]["mask"], question.share, rng)
    return [arrays | {"mask": mask} for mask in masks for arrays in found]


def _masks(mask: Any, share: int, rng: np.random.Generator) -> list[Any]:
    """Return masks that each name one of `share` neurons, and together all."""
    from picompile_runtime.devices.memory import aligned_zeros

    owners = rng.integers(0, share, mask.shape)
    masks = []
    for number in range(share):
        masks.append(aligned_zeros(mask.shape, mask.dtype))
        masks[-1][:] = owners == number
    return masks
