"""An NVIDIA GPU as the accelerator; see `picompile_runtime.devices.accelerator`.

Nothing is compiled when it is opened, unless the GPU is newer than the artifact's cubin: then the driver compiles the
PTX. There are three streams. The first runs one graph or several. The second copies writes, so that they do not wait
for the first. In the third, copies of weights that the host keeps become parts of graphs; if the system cannot pin
these weights, the copies go through pinned buffers: see `bounce`. Stamped calls run as graphs of their own, which also
record events: see `stopwatch`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_void_p
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cpu.native import HostLibrary, Stamps
from picompile_runtime.devices.cuda import driver
from picompile_runtime.devices.cuda.bounce import BounceBuffers
from picompile_runtime.devices.cuda.driver import OUT_OF_MEMORY, CudaError, Driver, GpuCallError, GpuMemoryError
from picompile_runtime.devices.cuda.graph import BoundCopy, BoundLaunch, Node, runnable_graph
from picompile_runtime.devices.cuda.memory import (
    BUFFER_BYTES,
    GpuMemory,
    Staging,
    UnpinnedMemory,
    data_address,
    host_array,
    view_address,
    view_host_address,
)
from picompile_runtime.devices.cuda.module import CudaImages, check_arguments, choose_image, load_module
from picompile_runtime.devices.cuda.stopwatch import FailureWatch, GpuStopwatch
from picompile_runtime.devices.memory import in_units
from picompile_runtime.errors import ArtifactError, DoesNotFitError

# Results of pinning memory: this memory cannot be pinned, there is too little of it, or this system cannot pin any.
_CANNOT_PIN = frozenset({1, OUT_OF_MEMORY, 801})
_LAUNCH_TIMEOUT = 702
# GPU memory that the driver keeps: for itself, and for each launch in a graph, before CUDA 12.4 and since.
_DRIVER_BYTES, _OLD_LAUNCH_BYTES, _LAUNCH_BYTES = 2**25, 2**16, 2**12


@dataclass(frozen=True)
class BoundGraphs:
    """The result of `bind`: for each graph, in order, the launches of its calls, and the graph itself.

    `stamped` has the same graphs with events in them, after a step with stamps has started. There copies wait for what
    is before them, and what is behind them waits for them.
    """

    parts: tuple[tuple[tuple[BoundLaunch | BoundCopy, ...], ...], ...]
    graphs: tuple[c_void_p, ...]
    stamped: list[c_void_p] = field(default_factory=list)


class CudaAccelerator:
    """The GPU that CUDA programs use by default, as an `Accelerator`. Different threads may use it, one at a time.

    Raises NoGpuError where there is no driver, no GPU, or one that cannot run the images.
    """

    slow_stamps = True
    pins_memory = True
    name: str
    sm: int
    total_bytes: int
    driver_version: str

    def __init__(
        self,
        images: CudaImages,
        library: str | None = None,
        staging_bytes: int = BUFFER_BYTES,
        host: HostLibrary | None = None,
    ) -> None:
        """Open the GPU. `library` is the driver's path, by default `driver.LIBRARY`.

        Copies use two buffers of `staging_bytes` of pinned memory. `host`, which `close` gives back, has the code for
        copies from memory that the system cannot pin; they use two buffers more. Without it `adopt` raises there.
        """
        self._images, self._driver = images, Driver(library or driver.LIBRARY)
        device = self._driver.first_device()
        self.name, self.sm = self._driver.name(device), self._driver.sm(device)
        self.total_bytes, self.driver_version = self._driver.total_bytes(device), self._driver.version()
        image = choose_image(images, self.sm, self.name)
        self._closed, self._streams = True, list[c_void_p]()
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="picompile-gpu")
        self._stamps: Stamps | None = None
        self._is_launching = False
        self._failed: BaseException | None = None
        self._abandoned: NDArray[np.int32] | None = None
        self._watch: FailureWatch | None = None
        # Held while a stream is captured, and while the watch asks about it: the driver discards a capture if anyone
        # asks about its stream.
        self._capturing = threading.Lock()
        # With this variable a launch returns only after the kernels have run, and a GPU that waits for the host would
        # wait for ever. Another thread launches then.
        self._launches_wait = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
        self._adopted = list[mmap.mmap]()
        self._host, self._staging_bytes = host, staging_bytes
        self._buffers: BounceBuffers | None = None
        self.unpinned_bytes = 0
        self._owned = ExitStack()
        self._owned_context = ExitStack()
        self._context = self._owned_context.enter_context(self._driver.primary_context(device))
        self._closed = False
        try:
            with self._current():
                self._module = self._owned.enter_context(load_module(self._driver, image))
                self._compute, self._uploads, self._copies = self._stream(), self._stream(), self._stream()
                self._staging = self._pinned(staging_bytes)
                self._stopwatch = GpuStopwatch(self._driver, self._compute, self._owned)
        except BaseException:
            self.close()
            raise

    def has_kernel(self, name: str) -> bool:
        """Return whether the images have a kernel of this name."""
        return name in self._images.kernels

    def graph_bytes(self, kernels: Sequence[str]) -> int:
        """Return an estimate of the GPU memory in bytes that the driver keeps for graphs of calls of these kernels.

        Drivers before CUDA 12.4 keep 64 KiB for each launch or copy, according to PyTorch's documentation of its CUDA
        graphs; for newer ones 2.7 KB were reported. A copy counts as one: whether it must be several, through buffers,
        is not known before its memory is adopted.
        """
        nodes = sum(len(self._images.kernels.get(name, ())) + (name in self._images.copies) for name in kernels)
        version = tuple(map(int, self.driver_version.split(".")))
        return _DRIVER_BYTES + nodes * (_OLD_LAUNCH_BYTES if version < (12, 4) else _LAUNCH_BYTES)

    def free_bytes(self) -> int:
        """Return how many bytes of the GPU's memory are free now."""
        with self._current():
            return self._driver.free_bytes()

    def allocate(self, size_bytes: int, purpose: str) -> GpuMemory:
        """Return zeroed memory of the GPU, aligned to 256 bytes. Raises DoesNotFitError, naming `purpose`."""
        size_bytes = max(size_bytes, 1)  # the driver does not allocate 0 bytes
        with self._current(), ExitStack() as stack:
            try:
                address = stack.enter_context(self._driver.device_memory(size_bytes))
            except GpuMemoryError as error:
                raise self._does_not_fit(size_bytes, purpose) from error
            # Not in the stream of kernels, where some may wait for the host.
            self._driver.call("cuMemsetD8Async", address, 0, size_bytes, self._uploads)
            self._driver.call("cuStreamSynchronize", self._uploads)
            self._keep(stack)
        return GpuMemory(address, size_bytes)

    def share(self, size_bytes: int, purpose: str) -> tuple[GpuMemory, NDArray[Any]]:
        """Return zeroed memory of the host that kernels see. Do not use the array after `close`, which frees it."""
        with self._current(), ExitStack() as stack:
            try:
                host_address, address = stack.enter_context(self._driver.shared_memory(max(size_bytes, 1)))
            except CudaError as error:
                raise _not_pinned(purpose, size_bytes, error) from error
            ctypes.memset(host_address, 0, size_bytes)
            self._keep(stack)
        return GpuMemory(address, size_bytes, host_address), host_array(host_address, size_bytes)

    def adopt(self, memory: mmap.mmap) -> GpuMemory | UnpinnedMemory:
        """Pin memory of the host so that kernels read it over the bus. It must not be unmapped before `close`.

        If the system cannot pin it, it can still be copied. Raises DoesNotFitError if not even buffers can be pinned.
        """
        address, size_bytes = np.frombuffer(memory, np.uint8).ctypes.data, len(memory)
        adopted: GpuMemory | UnpinnedMemory
        with self._current(), ExitStack() as stack:
            try:
                device_address = stack.enter_context(self._driver.registered_memory(address, size_bytes))
                adopted = GpuMemory(device_address, size_bytes, address)
            except CudaError as error:
                refusal = _not_pinned("weights that the GPU reads from the host for prompts", size_bytes, error)
                function = None if self._host is None else self._host.copy_part
                if error.result not in _CANNOT_PIN or function is None:
                    raise refusal from error
                adopted = UnpinnedMemory(address, size_bytes, self._bounce_buffers(function), str(refusal))
                self.unpinned_bytes += size_bytes
            self._keep(stack)
            self._adopted.append(memory)
        return adopted

    def write(self, memory: GpuMemory, offset: int, data: NDArray[Any]) -> None:
        """Copy an array uint8 [n] to the GPU's memory, and return when `data` may change again.

        It does not wait for kernels that run, which must not use these bytes; kernels that are started later see them.
        """
        address = data_address(memory, offset, data)
        with self._current():
            self._staging.write(address, data, self._compute)

    def protect(self, memory: GpuMemory) -> None:
        """Do nothing: the driver has no memory that kernels cannot write to."""

    def read(self, memory: GpuMemory, offset: int, data: NDArray[Any]) -> None:
        """Copy from the GPU's memory to an array uint8 [n], after everything that was started has run."""
        address = data_address(memory, offset, data)
        with self._current():
            self._staging.read(address, data, self._compute)

    def copy(self, memory: GpuMemory, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy inside one memory; each move is (from offset, to offset, bytes), and no two overlap."""
        places = [(memory.at(target, size), memory.at(source, size), size) for source, target, size in moves if size]
        with self._current():
            for target, source, size_bytes in places:
                self._driver.call("cuMemcpyDtoDAsync_v2", target, source, size_bytes, self._compute)
            self._driver.call("cuStreamSynchronize", self._compute)

    def bind(self, calls: Sequence[tuple[str, Sequence[ArgumentView]]], breaks: Sequence[int] = ()) -> BoundGraphs:
        """Make one graph or several of a list of calls, each a kernel's name and its arguments.

        `breaks` are the numbers of the calls with which a new graph begins, ascending. Raises ArtifactError, and
        DoesNotFitError where a kernel reads memory that the system cannot pin.
        """
        bounds = [(start, stop) for start, stop in pairwise([0, *breaks, len(calls)]) if start < stop]
        with self._current(), ExitStack() as stack:
            launches = [tuple(self._launches(name, views)) for name, views in calls]
            parts = tuple(tuple(launches[start:stop]) for start, stop in bounds)
            graphs = tuple(self._graph(list(chain(*part)), stack, self._copies) for part in parts)
            self._keep(stack)
        return BoundGraphs(parts, graphs)

    def tell_failures(self, abandoned: NDArray[np.int32]) -> None:
        """Set abandoned[0] from now on when a graph cannot be launched, and soon after a kernel has failed."""
        self._abandoned = abandoned
        driver, context, stream, capturing = self._driver, self._context, self._compute, self._capturing

        def has_failed() -> bool:
            with suppress(CudaError), driver.current(context), capturing:
                return not driver.is_well(stream)
            return True

        self._watch = FailureWatch(has_failed, abandoned)

    def start(self, calls: BoundGraphs, stamps: Stamps | None = None) -> None:
        """Start a list from `bind`, and return without waiting for it.

        `stamps` are as exact as `GpuStopwatch` says; calls that get them must be waited for before others are started.
        """
        graphs: Sequence[c_void_p] = calls.graphs
        if not graphs:
            return
        if stamps is not None:
            with self._current():
                graphs = self._stamped(calls)
                self._stopwatch.align()
        if self._watch is not None:
            self._watch.begin()
        if not self._launches_wait and stamps is None and len(graphs) == 1:
            self._launch(graphs, stamps)
            return
        # Another thread launches. If the GPU's queue is full, or if launches wait, the host would wait in the launch
        # for a GPU that waits for the host. The flag is set first, since an interrupt can come after.
        self._is_launching = True
        self._launcher.submit(self._try_to_launch, graphs, stamps)

    def wait(self) -> None:
        """Return when everything that was started has run. Raises KernelError if any of it failed."""
        if self._is_launching:
            self._await_launcher()
        failed, self._failed, stamps, self._stamps = self._failed, None, self._stamps, None
        with self._current():
            try:
                self._driver.call("cuStreamSynchronize", self._compute)
            except CudaError as error:
                raise GpuCallError(f"the GPU: {error}; {_cause(error.result)}", error.result) from error
            finally:
                if self._watch is not None:
                    self._watch.end()
            if failed is not None:
                raise failed
            if stamps is not None:
                self._stopwatch.read(stamps)

    def after_fork(self) -> str:
        """Give up the GPU: a forked process has neither its memory nor the shared memory, and may not call the driver.

        Returns why the GPU cannot be used.
        """
        self._closed = True
        self._driver.disown()
        return "the GPU belongs to the process that loaded the engine; load the model in a process that was not forked"

    def close(self) -> None:
        """Free all memory after everything that runs has ended. Errors of the GPU are ignored."""
        if self._closed:
            return
        self._closed, self._abandoned = True, None
        self._launcher.shutdown()
        if self._watch is not None:  # before the memory that it writes to is freed
            self._watch.close()
        with suppress(CudaError), self._owned_context, ExitStack() as stack:
            with suppress(CudaError):
                stack.enter_context(self._current())
            stack.enter_context(self._owned)
            for stream in self._streams:  # no memory is freed that a copy or a kernel uses
                with suppress(CudaError):
                    self._driver.call("cuStreamSynchronize", stream)
        self._adopted.clear()
        if self._host is not None:
            self._host.close()

    def __del__(self) -> None:
        """Close it: freeing needs a current context, which context managers that are garbage-collected do not have."""
        if not getattr(self, "_closed", True):
            self.close()

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU's context current, as each method must: contexts are per thread."""
        with self._driver.current(self._context):
            yield

    def _launch(self, graphs: Sequence[c_void_p], stamps: Stamps | None) -> None:
        with self._current():
            for graph in graphs:
                self._driver.call("cuGraphLaunch", graph, self._compute)
                self._driver.submit(self._compute)
        self._stamps = stamps

    def _try_to_launch(self, graphs: Sequence[c_void_p], stamps: Stamps | None) -> None:
        try:
            self._launch(graphs, stamps)
        except BaseException as error:
            self._failed = error
            if self._abandoned is not None:
                self._abandoned[0] = 1

    def _await_launcher(self) -> None:
        """Return when the launching thread is idle."""
        last = self._launcher.submit(lambda: None)
        try:
            wait([last])
        except KeyboardInterrupt:  # the next step must find launcher and GPU idle
            wait([last])
            with suppress(CudaError), self._current():
                self._driver.call("cuStreamSynchronize", self._compute)
            raise
        finally:
            self._is_launching = False

    def _pinned(self, staging_bytes: int) -> Staging:
        try:
            return Staging(self._driver, staging_bytes, self._uploads, self._owned)
        except CudaError as error:
            raise _not_pinned("buffers for copies to the GPU", 2 * staging_bytes, error) from error

    def _bounce_buffers(self, function: int) -> BounceBuffers:
        """Return the buffers for copies from memory that is not pinned; the first time, make them."""
        if self._buffers is None:
            try:
                self._buffers = BounceBuffers(self._driver, function, self._staging_bytes, self._owned)
            except CudaError as error:
                raise _not_pinned("buffers for copies of weights to the GPU", 2 * self._staging_bytes, error) from error
        return self._buffers

    def _graph(self, nodes: Sequence[Node], stack: ExitStack, copies: c_void_p | None = None) -> c_void_p:
        with self._capturing:
            return stack.enter_context(runnable_graph(self._driver, nodes, self._compute, copies))

    def _stamped(self, calls: BoundGraphs) -> Sequence[c_void_p]:
        """Return the graphs of `calls` with events in them; the first time, make them."""
        if not calls.stamped:
            firsts = [0, *accumulate(len(part) for part in calls.parts)]
            with ExitStack() as stack:
                pairs = zip(calls.parts, firsts, strict=False)
                graphs = [self._graph(list(self._stopwatch.nodes(part, first)), stack) for part, first in pairs]
                self._keep(stack)
            calls.stamped.extend(graphs)
        return calls.stamped

    def _stream(self) -> c_void_p:
        self._streams.append(self._owned.enter_context(self._driver.stream()))
        return self._streams[-1]

    def _keep(self, stack: ExitStack) -> None:
        """Let `close` free the contents of `stack`."""
        self._owned.push(stack.pop_all())

    def _launches(self, name: str, views: Sequence[ArgumentView]) -> Iterator[BoundLaunch | BoundCopy]:
        if name in self._images.copies:
            yield self._copy(name, views)
            return
        if name not in self._images.kernels:
            raise ArtifactError(f"the artifact's GPU code has no kernel {name}; compile the model again")
        addresses = [view_address(name, view) for view in views]
        for launch in self._images.kernels[name]:
            check_arguments(launch, len(addresses), name)
            arguments = tuple(addresses[index] for index in launch.args)
            sizes = tuple(views[index].tensor.size_bytes for index in launch.args)
            yield BoundLaunch(
                name, launch, function=self._module.function(launch.symbol), addresses=arguments, sizes=sizes
            )

    def _copy(self, name: str, views: Sequence[ArgumentView]) -> BoundCopy:
        source, target = self._images.copies[name]
        if max(source, target) >= len(views):
            raise ArtifactError(f"kernel {name} copies argument {max(source, target)} and the call has {len(views)}")
        given, size = views[source], views[target].tensor.size_bytes
        address = view_host_address(name, given)
        if address is None or given.tensor.size_bytes != size:
            raise ArtifactError(f"kernel {name}: it copies {size} bytes of the host's memory, and is given others")
        buffers = given.memory.buffers if isinstance(given.memory, UnpinnedMemory) else None
        return BoundCopy(name, source=address, target=view_address(name, views[target]), size=size, buffers=buffers)

    def _does_not_fit(self, size_bytes: int, purpose: str) -> DoesNotFitError:
        needed, free = in_units(size_bytes, self._driver.free_bytes())
        return DoesNotFitError(
            f"{purpose} needs {needed} of GPU memory and {free} are free; "
            "compile with a smaller --vram-budget or --context"
        )


def _not_pinned(purpose: str, size_bytes: int, error: CudaError) -> CudaError | DoesNotFitError:
    """Return the error to raise for `error`: DoesNotFitError if the system cannot pin memory, else `error` itself."""
    if error.result not in _CANNOT_PIN:
        return error
    return DoesNotFitError(
        f"{purpose}: the system cannot pin {size_bytes / 2**20:.0f} MiB of memory ({error.call}), so the GPU "
        "cannot use it; close other programs; WSL2 can pin about half of its memory: give it more (.wslconfig)"
    )


def _cause(result: int) -> str:
    if result == _LAUNCH_TIMEOUT:
        return "a kernel waited too long for the host: on a GPU that drives a display, kernels must end within seconds"
    return "a kernel failed, and the model must be loaded again"
