"""Does the work of each kind of unit, in a process that may fail: see `_gpu_units.py`."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from _gpu_bundled import check_bundled
from _gpu_dense import matrix_vector_seconds, measure_copied
from _gpu_engines import Plan, check_model, measure_model
from _gpu_host import ping_pong, read_bandwidths, start_seconds, touch
from _gpu_kernels import TIMING, Timing, copy_bandwidth, images_of, run_case

from picompile_runtime import DoesNotFitError
from picompile_runtime.devices.cuda import CudaAccelerator, driver

Result = dict[str, Any]

# Copies wait for nothing, so that a few tokens say all.
_COPIED_TOKENS = 8
# On a stand-in nothing is measured, but all that measuring takes is done.
_STAND_IN_TIMING = Timing(2**15, 2**20, 0.0, 0.0, 1, 3)
_ROUNDS, _STAND_IN_ROUNDS = 10_000, 100
# A step of llama-70b is 726 launches.
_LAUNCHES, _STAND_IN_LAUNCHES = (500, 1500, 5000), (2, 5)


def work(kind: str, options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    """The rows of a unit."""
    driver.LIBRARY = options.device_library or driver.LIBRARY
    yield from _KINDS[kind](options, content)


def does_not_fit(error: Exception) -> bool:
    """Whether an error says no more than that this machine is too small."""
    return isinstance(error, DoesNotFitError | MemoryError | torch.OutOfMemoryError)


def _torch_device(options: Namespace) -> str:
    return "cpu" if options.device_library or not torch.cuda.is_available() else "cuda"


def _machine(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    device = CudaAccelerator(images_of(options.pack, content["folder"]))
    found = {"gpu": device.name, "sm": device.sm, "bytes": device.total_bytes, "driver": device.driver_version}
    device.close()
    yield {"machine": found | {"torch": torch.__version__}}


def _ping_pong(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    images, rounds = images_of(options.pack, content["folder"]), _ROUNDS
    if options.device_library:
        rounds = _STAND_IN_ROUNDS
    yield {"ping_pong": ping_pong(images, options.pack / content["host"], rounds)}


def _queue(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    counts = _STAND_IN_LAUNCHES if options.device_library else _LAUNCHES
    yield {"start_s": start_seconds(images_of(options.pack, content["folder"]), options.pack / content["host"], counts)}


def _host(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield {"host_bytes_per_s": read_bandwidths(options.pack / content["host"], options.threads)}


def _memory(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield {"touched": touch(content["bytes"], content["limit_s"])}


def _limits(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    """Yield the baselines of kernels: copies, and cuBLAS products with the matrices of a gated and a plain block."""
    yield {"copy_bytes_per_s": copy_bandwidth(images_of(options.pack, content["folder"]), _timing(options))}
    if _torch_device(options) == "cuda":
        counts = {"gated": 3, "plain": 2}
        yield {f"cublas_{name}_s": matrix_vector_seconds(4096, 4096, count) for name, count in counts.items()}


def _timing(options: Namespace) -> Timing:
    return _STAND_IN_TIMING if options.device_library else TIMING


def _kernel(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    timing = _timing(options) if content["speed"] and not options.case else None
    images = images_of(options.pack, content["folder"])
    # Small kernels are compared on the CPU: PyTorch starts slowly on the GPU, and under a memory checker never.
    torch_device = "cpu" if timing is None else _torch_device(options)
    yield from run_case(images, content, torch_device, timing)
    if torch_device == "cuda":
        torch.cuda.empty_cache()


def _check(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield check_model(options.pack, options.work, content, options.threads[0])


def _bundled(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    lengths = (3, 6, 1) if options.device_library else (options.prompts[0], options.tokens, options.repeats)
    yield check_bundled(options.pack, options.work, content, options.threads[0], lengths)


def _model(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    firing = {"active": content["active"], "skew": content["skew"]}
    plan = Plan(tuple(options.prompts), options.depth, options.tokens, options.repeats)
    yield from measure_model(options.pack, options.work, content, options.threads, firing, plan)


def _copied(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    if _torch_device(options) != "cuda":
        raise DoesNotFitError("PyTorch sees no GPU to copy to")
    yield measure_copied(content, min(options.tokens, _COPIED_TOKENS), options.repeats)


_KINDS: Mapping[str, Callable[[Namespace, Mapping[str, Any]], Iterator[Result]]] = {
    "machine": _machine,
    "ping_pong": _ping_pong,
    "queue": _queue,
    "host": _host,
    "memory": _memory,
    "limits": _limits,
    "kernel": _kernel,
    "check": _check,
    "bundled": _bundled,
    "model": _model,
    "copied": _copied,
}
