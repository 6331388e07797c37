"""The contenders: one record each, in `ENGINES`. A new peer is one entry more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.outputs import Reading, llama_bench_reading, printed_timings_reading

SWEEPS = ("decode", "prefill", "context", "batch")
_GGUF = {"q4": ("q4_0",), "f16": ("f16",)}


@dataclass(frozen=True)
class Task:
    """A single measurement: see `worker.py`."""

    op: str
    threads: int
    context: int
    tokens: int
    batch: int = 1

    @property
    def counted(self) -> int:
        """Tokens that a measurement of it reads."""
        return self.context if self.op == "prefill" else self.tokens * self.batch


@dataclass(frozen=True)
class Engine:
    """A contender.

    Args:
        name: its label in tables, and its name in `--program`.
        file: the model file that it wants, a name in `Files.MAKERS`.
        formats: its weight formats for one of ours, the nearest one first.
        sweeps: those that it takes part in.
        worker: the module of this folder that keeps a model loaded and answers requests; "" of a built program.
        is_ours: the worker runs in this Python, not in that of `--peer-python`.
        arguments: of a built program, those after its path, for a model file and a task.
        read: of a built program, the speed in what it printed, of a prompt or of decoding.
    """

    name: str
    file: str
    formats: Mapping[str, Sequence[str]] = field(default_factory=lambda: _GGUF)
    sweeps: Sequence[str] = SWEEPS
    worker: str = ""
    is_ours: bool = False
    arguments: Callable[[Path, Task], list[object]] | None = None
    read: Callable[[str, bool], Reading] | None = None


def _llama_bench(model: Path, task: Task) -> list[object]:
    test = ["-p", task.context, "-n", 0] if task.op == "prefill" else ["-p", 0, "-n", task.tokens, "-d", task.context]
    return ["-m", model, *test, "-t", task.threads, "-r", 1, "-o", "json"]


def _ik_llama_bench(model: Path, task: Task) -> list[object]:
    """The option for decoding behind a context has another name."""
    test = ["-p", task.context, "-n", 0]
    if task.op != "prefill":
        test = ["-p", 0, "-n", 0, "-gp", f"{task.context},{task.tokens}"]
    return ["-m", model, *test, "-t", task.threads, "-r", 1, "-o", "json"]


def _powerinfer_main(model: Path, task: Task) -> list[object]:
    """The vocabulary of the file has bytes: a letter is a token, and four come before the first one."""
    prompt, tokens = "x" * (task.context - 4), 1 if task.op == "prefill" else task.tokens + 1
    sizes = ["-c", task.context + tokens, "-n", tokens, "-t", task.threads]
    return ["-m", model, *sizes, "--ignore-eos", "--temp", 0, "-p", prompt]


_ALONE = ("decode", "prefill")
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("picompile", "artifact", {"q4": ("q4",), "f16": ("f16",)}, worker="picompile", is_ours=True),
        Engine("llama.cpp", "gguf", worker="llama"),
        Engine("llama-bench", "gguf", sweeps=_ALONE, arguments=_llama_bench, read=llama_bench_reading),
        Engine("ik_llama.cpp", "gguf", sweeps=_ALONE, arguments=_ik_llama_bench, read=llama_bench_reading),
        Engine(
            "PowerInfer", "powerinfer", sweeps=_ALONE, arguments=_powerinfer_main, read=printed_timings_reading
        ),
        Engine("OpenVINO", "openvino", {"q4": ("q4", "q8"), "f16": ("f16",)}, _ALONE, worker="openvino"),
        Engine(
            "torch", "checkpoint", {"f16": ("bfloat16", "float16")}, (*_ALONE, "batch"),
            worker="torch", is_ours=True,
        ),
    )
}  # fmt: skip
# Programs that somebody has built; the others come from package registries.
PROGRAMS = tuple(name for name, engine in ENGINES.items() if engine.arguments)
