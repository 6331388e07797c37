"""What `gpu.py` does, in units, and the child processes that do them.

What fails on a GPU takes its process with it: after a wrong access no later call of the driver succeeds, PyTorch's
calls included, and a kernel that waits for ever is ended by nothing else. So the process that has the results never
touches the GPU. Another one does units in their order and sends rows of results; where it fails, dies or takes too
long, the unit's row says so, and a new process goes on with the next unit.
"""

import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from _gpu_dense import matrix_vector_seconds, measure_copied
from _gpu_engines import check_model, measure_model
from _gpu_kernels import copy_bandwidth, images_of, run_case

from picompile_runtime import DoesNotFitError
from picompile_runtime.cuda import CudaDevice, driver

Result = dict[str, Any]

# Besides a row's own limit: importing, and the first calls of driver and PyTorch.
_START_S, _END_S = 90.0, 10.0
# Copies wait for nothing, so that a few tokens say all.
_COPIED_TOKENS = 8


@dataclass(frozen=True)
class Unit:
    """`kind` says what is done with `content`; its rows go to `table` with `facts`, and take `limit_s` each at most."""

    kind: str
    table: str
    content: Mapping[str, Any]
    facts: Mapping[str, Any]
    limit_s: float = 60.0


def run(units: Sequence[Unit], options: Namespace, deadline_s: float) -> Iterator[tuple[Unit, Result | None]]:
    """Rows of `units`, as they come, and None behind those of each; until `deadline_s` of the monotonic clock.

    `options` are those of `gpu.py`, with a folder `work` that may be made and removed.
    """
    pending, context = deque(units), get_context("spawn")
    while pending and time.monotonic() < deadline_s:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, options, list(pending)), daemon=True)
        process.start()
        theirs.close()
        try:
            yield from _received(ours, process, pending, deadline_s)
        finally:
            process.kill()
            process.join(_END_S)


def _received(
    ours: Connection, process: BaseProcess, pending: deque[Unit], deadline_s: float
) -> Iterator[tuple[Unit, Result | None]]:
    """The rows of one process. What it has done leaves `pending`, and so does the unit in which it ended."""
    extra_s, is_alive = _START_S, True
    while pending and is_alive:
        unit, left_s = pending[0], deadline_s - time.monotonic()
        wait_s, extra_s = unit.limit_s + extra_s, 0.0
        row: Result | None = {"is_right": False, "reason": f"nothing came within {wait_s:.0f} s"}
        if ours.poll(max(0.0, min(wait_s, left_s))):
            row = _row(ours, process)
        elif left_s < wait_s:
            return
        if row is not None:
            yield unit, {**unit.facts, **row}
            is_alive = "reason" not in row
        if row is None or not is_alive:
            yield pending.popleft(), None


def _row(ours: Connection, process: BaseProcess) -> Result | None:
    """What the process has sent: a row, or None at the end of a unit. Where it has ended, a row that says so."""
    try:
        row: Result | None = ours.recv()
    except (EOFError, OSError):
        process.join(_END_S)
        return {"is_right": False, "reason": f"the process ended with {process.exitcode}"}
    return row


def _serve(theirs: Connection, options: Namespace, units: Sequence[Unit]) -> None:
    """Does `units`, up to the first that fails."""
    driver.LIBRARY = options.device_library or driver.LIBRARY
    try:
        for unit in units:
            for row in _KINDS[unit.kind](options, unit.content):
                theirs.send(row)
            theirs.send(None)
    except Exception as error:
        lacks_memory = isinstance(error, (DoesNotFitError, MemoryError, torch.OutOfMemoryError))
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        theirs.send({"is_right": None if lacks_memory else False, "reason": reason})


def _torch_device(options: Namespace) -> str:
    return "cpu" if options.device_library or not torch.cuda.is_available() else "cuda"


def _machine(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    device = CudaDevice(images_of(options.pack / content["folder"] / "kernels"))
    found = {"gpu": device.name, "sm": device.sm, "bytes": device.total_bytes, "driver": device.driver_version}
    device.close()
    yield {"machine": found | {"torch": torch.__version__}}


def _limits(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    """What kernels are held against: copies, and products of cuBLAS for the matrices of a block, gated and not."""
    yield {"copy_bytes_per_s": copy_bandwidth(images_of(options.pack / content["folder"] / "kernels"))}
    yield {f"cublas_{name}_s": matrix_vector_seconds(4096, 4096, count) for name, count in (("gated", 3), ("plain", 2))}


def _kernel(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield from run_case(images_of(options.pack / content["folder"] / "kernels"), content, _torch_device(options))
    if _torch_device(options) == "cuda":
        torch.cuda.empty_cache()


def _check(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield check_model(options.pack, options.work, content, options.threads, _torch_device(options))


def _model(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    firing = {"active": options.active, "skew": content["skew"]}
    lengths = options.prompt, options.tokens, options.repeats
    yield measure_model(options.pack, options.work, content, options.threads, firing, lengths)


def _copied(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield measure_copied(content, min(options.tokens, _COPIED_TOKENS), options.repeats)


_KINDS: Mapping[str, Callable[[Namespace, Mapping[str, Any]], Iterator[Result]]] = {
    "machine": _machine,
    "limits": _limits,
    "kernel": _kernel,
    "check": _check,
    "model": _model,
    "copied": _copied,
}
