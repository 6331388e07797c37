"""The machine code of an artifact: its instruction sets, its accelerator, its files, and their manifest entries.

The kernels of all instruction sets have the same names and arguments, so that one program runs with any of them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from picompile.machine.targets import find_compiled_targets, gpu_of, native_target
from picompile.progress import Progress
from picompile_codegen.backend import CodeTarget
from picompile_codegen.build.host_library import build_host_library, require_c_compilers
from picompile_codegen.build.isa import BF16_BASE, ISAS, Isa
from picompile_codegen.lowering.lower import Lowered
from picompile_codegen.registry import BACK_ENDS
from picompile_runtime.devices.machine import is_machine, missing_features


@dataclass(frozen=True)
class Code:
    """The code for one instruction set, and its file in the artifact."""

    isa: Isa
    file: str

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry, which has all that the runtime needs to choose."""
        return self.isa.entry(self.file)


def planned_code(targets: str, *, bf16: bool = False) -> list[Code]:
    """Return the code that an artifact for `targets` (names with commas between) has, best first.

    With `bf16`, for a target that has bfloat16, prompts are computed in it, and there is code without it beside that.
    Without, that code is all: the others are the same but for their products of float16 weights.

    Raises:
        TargetError: a name is unknown, or nothing is compiled for it.
        MachineError: `native` is asked for, and no code can be made for this processor.
        ToolchainError: this machine cannot link the code.
    """

    wanted = {isa for target in find_compiled_targets(targets) for isa in target.isas}
    if any(ISAS[name].prompts_in_bf16 for name in wanted):
        wanted = {name for name in wanted if bf16 or not ISAS[name].prompts_in_bf16} | {BF16_BASE}
    # Of two instruction sets for one machine, the table has the better one last.
    isas = [isa for isa in reversed(ISAS.values()) if isa.name in wanted]
    require_c_compilers(isas)
    if len(isas) == 1:
        return [Code(isas[0], "kernels/host.so")]
    return [_apart(isa) for isa in isas]


def runs_here(code: Sequence[Code]) -> bool:
    """Return whether this machine can run any of `code`."""
    return any(is_machine(each.isa.machine) and not missing_features(each.isa.features) for each in code)


def native_code(file: str) -> Code:
    """Return the best code for this machine but for bfloat16, to be put into `file`. Raise `MachineError` for none."""
    isa = ISAS[native_target().isas[0]]
    return Code(ISAS[BF16_BASE] if isa.prompts_in_bf16 else isa, file)


def _apart(isa: Isa) -> Code:
    return Code(isa, f"kernels/host.{isa.name}.so")


def build_code(
    code: Sequence[Code], lowered: Lowered, folder: Path, progress: Progress, stop: Event | None = None
) -> None:
    """Compile the host's kernels of `lowered` into the artifact's `folder`. Raise `BuildError`, also once `stop` is
    set.
    """
    (folder / "kernels").mkdir(exist_ok=True)
    with progress.step("kernels", len(code) * len(lowered.kernels)) as advance:
        for each in code:
            build_host_library(lowered.kernels_for(each.isa), folder / each.file, each.isa, stop, advance)


@contextmanager
def building(code: Sequence[Code], lowered: Lowered, folder: Path, progress: Progress) -> Iterator[Future[None]]:
    """Compile the host's kernels in a thread of its own, as `build_code` does, while the block runs.

    Yields:
        The job, whose result raises what `build_code` raised. If the block ends with an exception, no further kernel is
        begun, and those that are being compiled are waited for.
    """
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(build_code, code, lowered, folder, progress, stop)
        try:
            yield job
            job.result()
        except BaseException:
            stop.set()
            raise


@dataclass(frozen=True)
class AcceleratorTarget:
    """An accelerator to compile for: the name of its back end, and the architecture of a GPU, as that calls it."""

    kind: str
    architecture: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether it is the GPU of a target."""
        return BACK_ENDS[self.kind].is_gpu

    def build(self, code: "Sequence[Code]", lowered: Lowered, folder: Path, progress: Progress) -> dict[str, Any]:
        """Compile its kernels of `lowered` into `folder`; return the manifest's entry. Raise `BuildError`."""
        target = CodeTarget(tuple(each.isa for each in code), self.architecture)
        build = BACK_ENDS[self.kind].build
        with progress.step("accelerator"):
            return {"kind": self.kind, **build(lowered.accelerator_built, folder / "kernels", target)}


def accelerator_target(kind: str | None, targets: str) -> AcceleratorTarget | None:
    """Return the accelerator to compile for, or None where there is none.

    Args:
        kind: the name of its back end, or None.
        targets: names of rows of the table of targets; the GPU among them has the architecture.

    Raises:
        ToolchainError: there is nothing to make its code with.
    """
    if kind is None:
        return None
    BACK_ENDS[kind].require()
    gpu = gpu_of(targets)
    return AcceleratorTarget(kind, "" if gpu is None else gpu.architecture)
