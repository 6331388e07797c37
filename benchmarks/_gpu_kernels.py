"""Kernels of a pack: whether each equals eager PyTorch, and which share of the copy bandwidth it reaches."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _gpu_example import Example
from _gpu_examples import example
from _gpu_formats import Array
from _gpu_memory import Arguments

from picompile_runtime.cuda import CudaDevice, DeviceImages, read_images
from picompile_runtime.device import View

LIMIT = 1e-3
# Several times the second-level cache of an H100, which has 50 MB, and of an H200.
_WORKING_SET_BYTES = 2**28
_MOST_COPIED_BYTES = 2**33
_COPY_BYTES, _COPIES_AT_ONCE = 2**30, 20
# A graph of launches takes about so long, so that starting it does not count; a few are run, and the median is taken.
_GRAPH_S, _GRAPHS = 0.01, 7
_MOST_LAUNCHES = 2000

Result = dict[str, Any]


def images_of(folder: Path) -> DeviceImages:
    """The code of a folder of a pack."""
    text, cubin, ptx = ((folder / f"device.{kind}").read_bytes() for kind in ("json", "cubin", "ptx"))
    return read_images(text, cubin, ptx, str(folder))


@contextmanager
def opened(images: DeviceImages) -> Iterator[CudaDevice]:
    """The GPU with the code of a pack. All its memory is given back."""
    device = CudaDevice(images)
    try:
        yield device
    finally:
        device.close()


def check(images: DeviceImages, case: Mapping[str, Any], torch_device: str) -> list[Result]:
    """Runs a case once for each of its shares, and compares with eager PyTorch."""
    results = []
    for seed, share in enumerate(case["shares"] or [1.0]):
        made = example(case["op"], case["parameters"], seed, torch_device, share)
        with opened(images) as device:
            results.append(_result(case, share) | _check(device, case, made))
    return results


def measure(
    images: DeviceImages, case: Mapping[str, Any], torch_device: str, copy_bytes_per_s: float
) -> Iterator[Result]:
    """The same, and how long a call takes when its weights come from memory."""
    for seed, share in enumerate(case["shares"] or [1.0]):
        made = example(case["op"], case["parameters"], seed, torch_device, share)
        with opened(images) as device:
            result = _result(case, share) | _check(device, case, made)
        with opened(images) as device:
            seconds = _seconds(device, case, made)
        result |= {"seconds": seconds, "moved_bytes": made.moved_bytes}
        if made.moved_bytes:
            result["bytes_per_s"] = made.moved_bytes / seconds
            result["copy_share"] = result["bytes_per_s"] / copy_bytes_per_s
        yield result


def copy_bandwidth(images: DeviceImages) -> float:
    """Bytes per second of copies within the GPU's memory, read and written bytes both counted: the best of five."""
    with opened(images) as device:
        memory = device.allocate(2 * _COPY_BYTES, "measuring the memory")
        part = np.random.default_rng(0).integers(0, 256, 2**24, np.uint8)
        for start in range(0, _COPY_BYTES, len(part)):
            device.write(memory, start, part)
        moves = [(0, _COPY_BYTES, _COPY_BYTES)] * _COPIES_AT_ONCE
        device.copy(memory, moves)
        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            device.copy(memory, moves)
            times.append(time.perf_counter() - start_s)
    return 2 * _COPY_BYTES * len(moves) / min(times)


def _result(case: Mapping[str, Any], share: float) -> Result:
    """`share` of the neurons fire, where the case is of any."""
    return {"label": case["label"], "op": case["op"], "share": share if case["shares"] else None}


def _check(device: CudaDevice, case: Mapping[str, Any], made: Example) -> Result:
    arguments = Arguments(device, case["arguments"], made)
    device.start(device.bind([(case["kernel"], arguments.views())]))
    device.wait()
    damaged = [name for name in arguments.guarded if not arguments.is_intact(name)]
    errors = {name: _error(arguments.read(name), value) for name, value in made.expected.items()}
    stray = [name for name, value in made.expected.items() if _is_stray(arguments.read(name), value)]
    worst = max(errors.values())
    is_right = worst <= LIMIT and not damaged and not stray
    return {"error": worst, "errors": errors, "written_outside": [*damaged, *stray], "is_right": is_right}


def _error(found: Array, expected: Array) -> float:
    """Of floats the largest difference, as a share of the largest expected; of integers of ‖difference‖ / ‖expected‖.

    Infinite where anything is no number but should be one.
    """
    rows = found[: len(expected)]
    if found.dtype.kind != "f":
        wide, right = rows.astype(np.float64), expected.astype(np.float64)
        return float(np.linalg.norm(wide - right) / max(np.linalg.norm(right), 1.0))
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
    """The median time of a call in a graph of many. Nothing is subtracted."""
    turns = max(1, -(-_WORKING_SET_BYTES // made.moved_bytes)) if made.moved_bytes else 1
    size = sum(made.inputs[name].nbytes for name in made.rotating)
    copies = max(1, min(turns, _MOST_COPIED_BYTES // max(size, 1)))
    masks = min(turns, 64) if made.masks else 1
    arguments = Arguments(device, case["arguments"], made, copies, masks)
    rng = np.random.default_rng(len(case["label"]))
    for mask in range(1, masks):
        arguments.write("mask", made.masks(rng), mask)  # type: ignore[misc]
    different = [(case["kernel"], arguments.views(turn)) for turn in range(max(copies, masks))]
    return median_seconds(device, different, made.moved_bytes)


def median_seconds(device: CudaDevice, calls: Sequence[tuple[str, Sequence[View]]], moved_bytes: int) -> float:
    """The median over a few graphs, in each of which all of `calls` have their turns many times."""
    expected_s = 4e-6 + moved_bytes / 2e12
    rounds = max(1, min(_MOST_LAUNCHES, int(_GRAPH_S / expected_s)) // len(calls))
    bound = device.bind(list(calls) * rounds)
    times = []
    for _ in range(_GRAPHS + 1):
        start = time.perf_counter()
        device.start(bound)
        device.wait()
        times.append((time.perf_counter() - start) / (rounds * len(calls)))
    return statistics.median(times[1:])
