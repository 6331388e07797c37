"""Does the work of each kind of unit, in a process that may fail: see `units.py`."""

import tarfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from benchmarks.gpu.bundled import check_bundled
from benchmarks.gpu.dense import matrix_vector_seconds, measure_copied
from benchmarks.gpu.engines import Plan, check_model, measure_model, smoke
from benchmarks.gpu.host import ping_pong, read_bandwidths, start_seconds
from benchmarks.gpu.kernels import TIMING, Timing, copy_bandwidth, images_of, run_case
from benchmarks.gpu.llama_bench import WAYS, BenchedModel, bench
from benchmarks.gpu.prepared import LARGE, LLAMA, LLAMA_PROGRAM, SMALL, prepare_gguf
from benchmarks.gpu.schedule import DEPTH, threads
from benchmarks.gpu.units import Unit
from picompile_runtime import DoesNotFitError, MachineError
from picompile_runtime.devices.cuda import CudaAccelerator, driver

Result = dict[str, Any]

# Tokens of a round, and rounds beside the first one. Copies wait for nothing, so that a few tokens say all.
_DECODED_TOKENS, _REPEATS, _COPIED_TOKENS = 32, 3, 8
# The bundled model reads so many tokens and decodes so many, in so many rounds; on a stand-in fewer are compared.
_BUNDLED_LENGTHS, _STAND_IN_TOKENS = (64, 32, 3), 8
# llama.cpp is ended so long before its part is over: it has tens of GB to give back.
_LLAMA_END_S = 10.0
# On a stand-in nothing is measured, but all that measuring takes is done.
_STAND_IN_TIMING = Timing(2**15, 2**20, 0.0, 0.0, 1, 3)
_ROUNDS, _STAND_IN_ROUNDS = 10_000, 100
_LAUNCHES, _STAND_IN_LAUNCHES = (500, 1500, 5000), (2, 5)


def work(kind: str, options: Namespace, unit: Unit) -> Iterator[Result]:
    """Yield the rows of a unit."""
    driver.LIBRARY = options.device_library or driver.LIBRARY
    if kind not in _WITHOUT_GPU:
        _hold_context(driver.LIBRARY)
    yield from _KINDS[kind](options, unit.content if kind != "llama" else {**unit.content, "ends_s": unit.ends_s})


@cache
def _hold_context(library: str) -> ExitStack:
    """Keep the GPU's primary context for as long as this process lives, since making one for each row takes 0.3 s."""
    loaded, kept = driver.Driver(library), ExitStack()
    kept.enter_context(loaded.primary_context(loaded.first_device()))
    return kept


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
    found = start_seconds(images_of(options.pack, content["folder"]), options.pack / content["host"], counts)
    yield {"start_s": found}
    if any(found[str(count)] is None for count in counts if count <= content["most"]):
        raise MachineError(f"the GPU's queue takes fewer than {content['most']} launches: see docs/gpu_first_run.md")


def _host(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    counts = sorted({max(1, threads() // 2), threads()})
    yield {"host_bytes_per_s": read_bandwidths(options.pack / content["host"], counts)}


def _limits(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    """Yield the baselines of kernels: copies, and cuBLAS products with the matrices of a gated and a plain block."""
    yield {"copy_bytes_per_s": copy_bandwidth(images_of(options.pack, content["folder"]), _timing(options))}
    if _torch_device(options) == "cuda":
        counts = {"gated": 3, "plain": 2}
        yield {f"cublas_{name}_s": matrix_vector_seconds(4096, 4096, count) for name, count in counts.items()}


def _timing(options: Namespace) -> Timing:
    return _STAND_IN_TIMING if options.device_library else TIMING


def _kernel(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    timing = _timing(options) if content["speed"] and options.verb != "case" else None
    images = images_of(options.pack, content["folder"])
    # Small kernels are compared on the CPU: PyTorch starts slowly on the GPU, and under a memory checker never.
    torch_device = _torch_device(options) if content["speed"] else "cpu"
    yield from run_case(images, content, torch_device, timing)
    if torch_device == "cuda":
        torch.cuda.empty_cache()


def _check(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield check_model(options.pack, options.work / SMALL, content, content["threads"])


def _bundled(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    lengths, most = ((3, 6, 1), _STAND_IN_TOKENS) if options.device_library else (_BUNDLED_LENGTHS, None)
    yield check_bundled(options.pack, options.work, content, content["threads"], lengths, most)


def _firing(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"active": content["active"]}


def _smoke(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    yield smoke(options.pack, options.work / LARGE, content, content["threads"], _firing(content))


def _model(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    plan = Plan(tuple(content["prompts"]), DEPTH, _DECODED_TOKENS, _REPEATS)
    yield from measure_model(options.pack, options.work / LARGE, content, content["threads"], _firing(content), plan)


def _copied(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    if _torch_device(options) != "cuda":
        raise DoesNotFitError("PyTorch sees no GPU to copy to")
    yield measure_copied(content, _COPIED_TOKENS, _REPEATS)


def _llama(options: Namespace, content: Mapping[str, Any]) -> Iterator[Result]:
    """Yield the rows of llama-bench. It ends by itself before this process would be ended: nobody would end it then."""
    folder = options.work / LLAMA
    with tarfile.open(options.pack / content["file"]) as archive:
        archive.extractall(folder, filter="data")
    file = prepare_gguf(options.pack / content["gguf"], options.work)
    model = BenchedModel(folder / LLAMA_PROGRAM, file, content["model"], content["layers"], content["threads"])
    for way in WAYS:
        yield from bench(model, way, max(1.0, content["ends_s"] - time.monotonic() - _LLAMA_END_S))


_KINDS: Mapping[str, Callable[[Namespace, Mapping[str, Any]], Iterator[Result]]] = {
    "machine": _machine,
    "ping_pong": _ping_pong,
    "queue": _queue,
    "host": _host,
    "limits": _limits,
    "kernel": _kernel,
    "check": _check,
    "bundled": _bundled,
    "smoke": _smoke,
    "model": _model,
    "copied": _copied,
    "llama": _llama,
}
# The context is made by the first that needs it; these need none.
_WITHOUT_GPU = frozenset({"host", "llama"})
