"""The sweeps that `benchmarks.peers` measures. The entries of a group are measured in turn and compared.

A group has one model, one task and several contenders. Ratios are to the one that is called llama.cpp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.peers.engines import ENGINES, SWEEPS, Task

CONTEXTS = (128, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT = 512
THREADS = (2, 1)
# Of each group, of those that the table has with their spread, and of the points of a curve.
ROUNDS = {"decode": 5}
FEWER_ROUNDS = 3
_Number = TypeVar("_Number", int, float)
# The positions of a model that are left for the steps behind the longest context.
_ROOM = 96
# Sweeps with every format of an engine; the others have the nearest one.
_WHOLE = ("decode", "prefill")


@dataclass(frozen=True)
class Model:
    """A checkpoint of `synth`."""

    shape: str
    active: float

    @property
    def name(self) -> str:
        # A shape may be a file.
        return f"{Path(self.shape).name.removesuffix('.json')}-{round(self.active * 100)}"


@dataclass(frozen=True)
class Contender:
    """An engine, a weight format, and for picompile how it knows what fires and for how many sequences it is made."""

    engine: str
    format: str
    predictor: str = ""
    sequences: int = 1

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.engine, self.format, self.predictor)))


@dataclass(frozen=True)
class Group:
    """`x` is what the sweep goes over; `format` is ours, to which the contenders are alike or near."""

    sweep: str
    format: str
    x: float
    model: Model
    task: Task
    contenders: tuple[Contender, ...]

    @property
    def key(self) -> str:
        task = self.task
        return (
            f"{self.sweep} {self.model.name} {self.format} "
            f"threads={task.threads} context={task.context} batch={task.batch}"
        )


@dataclass(frozen=True)
class Scale:
    """The amount of measurements."""

    shape: str = "reglu-1.3b"
    active: float = 0.10
    positions: int = 4096
    formats: Sequence[str] = ("q4", "f16")
    quick: bool = False

    @property
    def model(self) -> Model:
        """The model of all sweeps."""
        return Model(self.shape, self.active)

    def some(self, values: Sequence[_Number]) -> Sequence[_Number]:
        """All values, or of a quick run the first and the last."""
        return (values[0], values[-1]) if self.quick else values

    def rounds(self, sweep: str) -> int:
        """The number of rounds for each contender of a group."""
        return FEWER_ROUNDS if self.quick else ROUNDS.get(sweep, FEWER_ROUNDS)


def groups(scale: Scale, sweeps: Sequence[str]) -> list[Group]:
    """In the order of `SWEEPS`."""
    makers = {"decode": _decode, "prefill": _prefill, "context": _context, "batch": _batch}
    return [group for sweep in SWEEPS if sweep in sweeps for group in makers[sweep](scale)]


def _contenders(sweep: str, format: str, *predictors: str, sequences: int = 1) -> tuple[Contender, ...]:
    """Ours with each of the predictors, then every engine that takes part in the sweep."""
    ours = [Contender("picompile", format, predictor, sequences) for predictor in predictors]
    peers = [
        Contender(engine.name, its)
        for engine in ENGINES.values()
        if engine.name != "picompile" and sweep in engine.sweeps
        for its in engine.formats.get(format, ())[: None if sweep in _WHOLE else 1]
    ]
    return (*ours, *peers)


def _decode(scale: Scale) -> Iterator[Group]:
    for format in scale.formats:
        contenders = _contenders("decode", format, "learned", "exact", "none")
        for threads in THREADS[:1] if scale.quick else THREADS:
            task = Task("decode", threads, 128, 32 if format == "f16" else 64)
            yield Group("decode", format, threads, scale.model, task, contenders)


def _prefill(scale: Scale) -> Iterator[Group]:
    for format in scale.formats:
        contenders = _contenders("prefill", format, "learned")
        yield Group("prefill", format, 2, scale.model, Task("prefill", 2, PROMPT, 0), contenders)


def _context(scale: Scale) -> Iterator[Group]:
    """The longest context is the model's last tokens."""
    for format in scale.formats:
        contenders = _contenders("context", format, "learned")
        for context in scale.some(CONTEXTS):
            task = Task("decode", 2, min(context, scale.positions - _ROOM), 32)
            yield Group("context", format, context, scale.model, task, contenders)


def _batch(scale: Scale) -> Iterator[Group]:
    for format in scale.formats:
        contenders = _contenders("batch", format, "learned", sequences=max(BATCHES))
        for batch in scale.some(BATCHES):
            task = Task("decode", 2, 128, 16, batch)
            yield Group("batch", format, batch, scale.model, task, contenders)
