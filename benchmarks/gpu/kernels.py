"""Kernels of a pack: whether each equals eager PyTorch, and how long it takes."""

import math
import statistics
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.example import Example
from benchmarks.gpu.examples import example
from benchmarks.gpu.memory import Arguments
from benchmarks.gpu.weights import Array
from picompile_runtime.devices.cuda import CudaAccelerator, CudaImages, read_images

LIMIT = 1e-3
_MOST_COPIED_BYTES = 2**33
_COPIES_AT_ONCE = 20
# What memory gives at most, so that graphs do not get longer than they should: the GPU's, and the host's over the bus.
_MOST_BYTES_PER_S = {"gpu": 2e12, "host": 5e10}

Result = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Options of timing kernels.

    Weights that take turns have `working_set_bytes`, several times the second-level cache of an H100, which has 50 MB,
    or of an H200. A GPU that had nothing to do raises its clocks only after `warm_up_s`. A graph of launches takes
    about `graph_s`, so that starting it does not count; the median of `graphs` is taken.
    """

    working_set_bytes: int
    copy_bytes: int
    warm_up_s: float
    graph_s: float
    graphs: int
    most_launches: int


TIMING = Timing(2**28, 2**30, 0.3, 0.01, 7, 2000)


def images_of(pack: Path, name: str) -> CudaImages:
    """The code of one of a pack's lists of kernels."""
    with zipfile.ZipFile(pack / f"{name}.zip") as archive:
        text, cubin, ptx = (archive.read(f"device.{kind}") for kind in ("json", "cubin", "ptx"))
    return read_images(text, cubin, ptx, f"{pack}, {name}")


def run_case(
    images: CudaImages, case: Mapping[str, Any], torch_device: str, timing: Timing | None = None
) -> Iterator[Result]:
    """Compares with eager PyTorch, once for each of the case's shares, and with its weights on the host as well where
    they may be there; what is right is timed, if it shall be.
    """
    for seed, share in enumerate(case["shares"] or [1.0]):
        made = example(case["op"], case["parameters"], seed, torch_device, share)
        yield _row(images, case, made, share, timing)
        if case["streamed"]:
            streamed = replace(made, shared=(*made.shared, *made.rotating))
            yield {**_row(images, case, streamed, share, timing), "weights": "host"}


def _row(images: CudaImages, case: Mapping[str, Any], made: Example, share: float, timing: Timing | None) -> Result:
    result: Result = {"share": share if case["shares"] else None}
    with closing(CudaAccelerator(images)) as device:
        result |= _check(device, case, made)
    if timing is not None and result["is_right"]:
        with closing(CudaAccelerator(images)) as device:
            result |= {"seconds": _seconds(device, case, made, timing), "moved_bytes": made.moved_bytes}
    return result


def copy_bandwidth(images: CudaImages, timing: Timing = TIMING) -> float:
    """Bytes per second of copies within the GPU's memory, read and written bytes both counted: the best of several."""
    with closing(CudaAccelerator(images)) as device:
        size = timing.copy_bytes
        memory = device.allocate(2 * size, "measuring the memory")
        part = np.random.default_rng(0).integers(0, 256, min(size, 2**24), np.uint8)
        for start in range(0, size, len(part)):
            device.write(memory, start, part)
        moves = [(0, size, size)] * _COPIES_AT_ONCE
        return 2 * size * len(moves) / min(_times(lambda: device.copy(memory, moves), timing))


def _check(device: CudaAccelerator, case: Mapping[str, Any], made: Example) -> Result:
    arguments = Arguments(device, case["arguments"], made)
    device.start(device.bind([(case["kernel"], arguments.views())]))
    device.wait()
    errors = {name: _error(arguments.read(name), value) for name, value in made.expected.items()}
    stray = [name for name, value in made.expected.items() if _is_stray(arguments.read(name), value)]
    worst, outside = max(errors.values()), [*arguments.damaged(), *stray]
    is_right = worst <= LIMIT and not outside
    return {"error": worst, "errors": errors, "written_outside": outside, "is_right": is_right}


def _error(found: Array, expected: Array) -> float:
    """Return the largest difference of floats, as a share of the largest expected value; 0 for integers.

    Infinite where anything is no number but should be one, and where integers differ. Bytes of a cache are rounded from
    float32, and may differ by one.
    """
    rows = found[: len(expected)]
    if found.dtype.kind != "f":
        differences = np.abs(rows.astype(np.int64) - expected.astype(np.int64))
        return 0.0 if differences.max(initial=0) <= (found.dtype == np.int8) else math.inf
    expected = expected.astype(np.float64)
    is_number = np.isfinite(expected)
    # A cache holds NaN where nothing was written.
    if not np.array_equal(np.isfinite(rows), is_number):
        return math.inf
    difference = np.abs(rows.astype(np.float64)[is_number] - expected[is_number])
    return float(difference.max() / max(np.abs(expected[is_number]).max(), 1e-30))


def _is_stray(found: Array, expected: Array) -> bool:
    """Whether rows behind those of this step's tokens were written."""
    behind = np.ascontiguousarray(found[len(expected) :]).view(np.uint8)
    return bool((behind != 255).any())


def _seconds(device: CudaAccelerator, case: Mapping[str, Any], made: Example, timing: Timing) -> float:
    """The median time of a call, in graphs in each of which all copies and masks have their turns many times.

    Nothing is subtracted.
    """
    turns = max(1, -(-timing.working_set_bytes // made.moved_bytes)) if made.moved_bytes else 1
    size = sum(made.inputs[name].nbytes for name in made.rotating)
    copies = max(1, min(turns, _MOST_COPIED_BYTES // max(size, 1)))
    arguments = Arguments(device, case["arguments"], made, copies, made.masks)
    views = [arguments.views(turn) for turn in range(max(copies, 0 if made.masks is None else len(made.masks)))]
    rate = _MOST_BYTES_PER_S["host" if set(made.rotating) & set(made.shared) else "gpu"]
    launches = int(timing.graph_s / (4e-6 + made.moved_bytes / rate))
    rounds = max(1, min(timing.most_launches, launches) // len(views))
    bound = device.bind([(case["kernel"], each) for each in views] * rounds)

    def run() -> None:
        device.start(bound)
        device.wait()

    return statistics.median(_times(run, timing)) / (rounds * len(views))


def _times(run: Callable[[], object], timing: Timing) -> list[float]:
    """Seconds of `run`, again and again, once the GPU is at work for a while."""
    times: list[float] = []
    begin = start = time.perf_counter()
    while len(times) < timing.graphs or start - begin < timing.warm_up_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times[-timing.graphs :]
