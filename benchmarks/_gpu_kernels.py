"""Kernels of a pack: whether each equals eager PyTorch, and how long it takes."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from _gpu_example import Example
from _gpu_examples import example
from _gpu_memory import Arguments
from _gpu_weights import Array

from picompile_runtime.cuda import CudaDevice, DeviceImages, read_images

LIMIT = 1e-3
# Several times the second-level cache of an H100, which has 50 MB, and of an H200.
_WORKING_SET_BYTES = 2**28
_MOST_COPIED_BYTES = 2**33
_COPY_BYTES, _COPIES_AT_ONCE = 2**30, 20
# A GPU that had nothing to do raises its clocks only after a while.
_WARM_UP_S = 0.3
# A graph of launches takes about so long, so that starting it does not count; a few are run, and the median is taken.
_GRAPH_S, _GRAPHS = 0.01, 7
_MOST_LAUNCHES = 2000

Result = dict[str, Any]


def images_of(folder: Path) -> DeviceImages:
    """The code of a folder of a pack."""
    text, cubin, ptx = ((folder / f"device.{kind}").read_bytes() for kind in ("json", "cubin", "ptx"))
    return read_images(text, cubin, ptx, str(folder))


def run_case(images: DeviceImages, case: Mapping[str, Any], torch_device: str) -> Iterator[Result]:
    """Compares with eager PyTorch, once for each of the case's shares; and what is for speed, and right, is timed."""
    for seed, share in enumerate(case["shares"] or [1.0]):
        made = example(case["op"], case["parameters"], seed, torch_device, share)
        result: Result = {"share": share if case["shares"] else None}
        with closing(CudaDevice(images)) as device:
            result |= _check(device, case, made)
        if case["speed"] and result["is_right"]:
            with closing(CudaDevice(images)) as device:
                result |= {"seconds": _seconds(device, case, made), "moved_bytes": made.moved_bytes}
        yield result


def copy_bandwidth(images: DeviceImages) -> float:
    """Bytes per second of copies within the GPU's memory, read and written bytes both counted: the best of several."""
    with closing(CudaDevice(images)) as device:
        memory = device.allocate(2 * _COPY_BYTES, "measuring the memory")
        part = np.random.default_rng(0).integers(0, 256, 2**24, np.uint8)
        for start in range(0, _COPY_BYTES, len(part)):
            device.write(memory, start, part)
        moves = [(0, _COPY_BYTES, _COPY_BYTES)] * _COPIES_AT_ONCE
        return 2 * _COPY_BYTES * len(moves) / min(_times(lambda: device.copy(memory, moves)))


def _check(device: CudaDevice, case: Mapping[str, Any], made: Example) -> Result:
    arguments = Arguments(device, case["arguments"], made)
    device.start(device.bind([(case["kernel"], arguments.views())]))
    device.wait()
    errors = {name: _error(arguments.read(name), value) for name, value in made.expected.items()}
    stray = [name for name, value in made.expected.items() if _is_stray(arguments.read(name), value)]
    worst, outside = max(errors.values()), [*arguments.damaged(), *stray]
    is_right = worst <= LIMIT and not outside
    return {"error": worst, "errors": errors, "written_outside": outside, "is_right": is_right}


def _error(found: Array, expected: Array) -> float:
    """Of floats the largest difference, as a share of the largest expected; of integers 0.

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


def _seconds(device: CudaDevice, case: Mapping[str, Any], made: Example) -> float:
    """The median time of a call, in graphs in each of which all copies and masks have their turns many times.

    Nothing is subtracted.
    """
    turns = max(1, -(-_WORKING_SET_BYTES // made.moved_bytes)) if made.moved_bytes else 1
    size = sum(made.inputs[name].nbytes for name in made.rotating)
    copies = max(1, min(turns, _MOST_COPIED_BYTES // max(size, 1)))
    arguments = Arguments(device, case["arguments"], made, copies, made.masks)
    views = [arguments.views(turn) for turn in range(max(copies, 0 if made.masks is None else len(made.masks)))]
    rounds = max(1, min(_MOST_LAUNCHES, int(_GRAPH_S / (4e-6 + made.moved_bytes / 2e12))) // len(views))
    bound = device.bind([(case["kernel"], each) for each in views] * rounds)

    def run() -> None:
        device.start(bound)
        device.wait()

    return statistics.median(_times(run)) / (rounds * len(views))


def _times(run: Callable[[], object]) -> list[float]:
    """Seconds of `run`, again and again, once the GPU is at work for a while."""
    times: list[float] = []
    begin = start = time.perf_counter()
    while len(times) < _GRAPHS or start - begin < _WARM_UP_S:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times[-_GRAPHS:]
