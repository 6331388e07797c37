"""A program in memory: its buffers, state and weights, and each of its functions as a list of calls.

With an accelerator, a function is two lists of calls, one for the host and one for the accelerator. Both begin at once
and meet at flags in shared memory; a step is over when both lists have run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.call_order import check_code
from picompile_runtime.artifact.manifest import WEIGHTS
from picompile_runtime.artifact.program import BATCH, ONE_TOKEN_EACH, Call, Program
from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.artifact.weights import ResidentWeights, load_tensors, load_weights
from picompile_runtime.devices.accelerator import Accelerator
from picompile_runtime.devices.cpu.native import CallList, TensorTable
from picompile_runtime.devices.memory import Tensor, array_at, check_total
from picompile_runtime.devices.open_accelerator import open_accelerator, split_threads
from picompile_runtime.engine.layout import (
    AcceleratorLayout,
    HostLayout,
    accelerator_layout,
    fit_accelerator,
    host_layout,
    weights_of,
)
from picompile_runtime.engine.state import (
    AcceleratorState,
    HostState,
    SequenceState,
    StateMemory,
    host_state_bytes,
    sequence_states,
)
from picompile_runtime.engine.timing import CallSpan, CallTimes, step_timeout
from picompile_runtime.errors import KernelError, RequestError
from picompile_runtime.sampling.sampler import Logits, TopScores

Ids = NDArray[np.int32]
# The numbers of steps are int32, and 0 is in every flag at the start.
_MOST_STEPS = 2**31 - 1
# Number of layers that the accelerator computes for a chunk of a prompt before it may do something else. A GPU that
# drives a display ends kernels that hold it for two seconds, and the weights of 80 layers take longer to come over the
# bus for a chunk.
_LAYERS_TOGETHER = 8


class Executor:
    """Runs steps of a program. It neither checks tokens nor keeps the positions of sequences: see `Engine`."""

    def __init__(self, artifact: Artifact, threads: int, replan: bool = False, cache_tokens: int | None = None) -> None:
        """Load the program of `artifact`. `replan` lets `fit_accelerator` move weights; for `cache_tokens` see `load`.

        Raises DoesNotFitError if there is too little memory, ArtifactError if kernels are missing, and MachineError if
        this machine has no accelerator of the artifact's kind.
        """
        self._program = artifact.program
        self._threads, device_threads = split_threads(artifact, threads)
        self.library = artifact.load_code()
        self._accelerator: Accelerator | None = None
        self.unpinned_bytes = 0
        self.buffers: dict[str, NDArray[Any]] = {}
        self.states: tuple[SequenceState, ...] = ()
        try:
            check_code(artifact, self.library)
            _check_memory(self._program, cache_tokens)
            if self._program.has_accelerator:
                self._accelerator = open_accelerator(artifact, device_threads)
            self._fit(artifact, replan)
            self._load(artifact, threads)
        except BaseException:
            self.close()
            raise
        self._times: CallTimes | None = None
        self._step, self._tokens = self.buffers["step"], self.buffers["tokens"]
        self._positions, self._slots = self.buffers["positions"], self.buffers["slots"]

    def _fit(self, artifact: Artifact, may_move: bool) -> None:
        """Leave weights with the host if they `may_move` and the accelerator has too little memory for all."""
        accelerator, program = self._accelerator, artifact.program
        if accelerator is not None and (free_bytes := accelerator.free_bytes()) is not None:
            names = [call.kernel for name in program.functions for call in program.calls(name, "accelerator")]
            graph_bytes = accelerator.graph_bytes(names)
            self._program = fit_accelerator(program, artifact.tensors, free_bytes, may_move, graph_bytes)
        moved_names = self._program.streamed - program.streamed
        self.moved_bytes = sum(artifact.tensors[name].size_bytes for name in moved_names)

    def _load(self, artifact: Artifact, threads: int) -> None:
        program = self._program
        weights = self._load_weights(artifact, threads)
        host, self._accelerator_layout = host_layout(program, weights), AcceleratorLayout({})
        if self._accelerator is not None:
            self._accelerator_layout, shared = accelerator_layout(
                program,
                accelerator=self._accelerator,
                mapped=artifact.weights,
                tensors=artifact.tensors,
                of_host=weights,
            )
            self.unpinned_bytes = self._accelerator.unpinned_bytes
            of_host = {key: (shared, tensor.offset) for key, tensor in _shared_buffers(program).items()}
            host = HostLayout({**host.places, **of_host})
        self.buffers = _buffers(host, program.buffers)
        self.states = sequence_states(program, self._state_memories(host))
        tensors, waits = TensorTable(), program.waiting_kernels
        self._host_calls: dict[str, CallList] = {
            name: self.library.bind(
                [(call.kernel, [host.array(arg) for arg in call.args]) for call in program.calls(name, "host")],
                tensors,
                waits,
            )
            for name in program.functions
        }
        self._accelerator_calls = {name: self._bind_accelerator(name) for name in program.functions}
        if self._accelerator is not None:
            self._accelerator.tell_failures(self._abandoned)
        self.check_weights = artifact.check_weights if self._is_mapped(artifact) else _nothing
        artifact.check_weights()  # so all that was loaded is from the file that was checked

    def _state_memories(self, host: HostLayout) -> dict[str, StateMemory]:
        """Return the memory of each state tensor."""
        found: dict[str, StateMemory] = {
            name: HostState(memory) for (kind, name), (memory, _) in host.places.items() if kind == "state"
        }
        if self._accelerator is not None:
            for (kind, name), (memory, _) in self._accelerator_layout.places.items():
                if kind == "state":
                    found[name] = AcceleratorState(self._accelerator, memory)
        return found

    def _is_mapped(self, artifact: Artifact) -> bool:
        """Return whether steps read the weights from the mapped file."""
        memory = self._weights.memory if isinstance(self._weights, ResidentWeights) else self._weights
        return memory is artifact.weights

    def _load_weights(self, artifact: Artifact, threads: int) -> dict[str, tuple[Any, int]]:
        """Load and return the host's weights by name: all, or those that are not in the accelerator's memory."""
        other_bytes = self._program.arena_bytes + host_state_bytes(self._program)
        tensors = artifact.tensors
        if not self._program.has_accelerator:
            sha256 = artifact.manifest.files[WEIGHTS].sha256
            self._weights: Any = load_weights(artifact.weights, sha256, threads, other_bytes)
            return {name: (self._weights.memory, self._weights.start + each.offset) for name, each in tensors.items()}
        wanted = {name: tensors[name] for name in weights_of(self._program, "host")}
        pins_memory = self._accelerator is not None and self._accelerator.pins_memory
        must_copy = bool(self._program.streamed) and pins_memory
        self._weights, places = load_tensors(
            artifact.weights, tensors=wanted, threads=threads, other_bytes=other_bytes, must_copy=must_copy
        )
        return {name: (self._weights, place) for name, place in places.items()}

    def _bind_accelerator(self, function: str) -> Any:
        if self._accelerator is None:
            return None
        view, calls = self._accelerator_layout.view, self._program.calls(function, "accelerator")
        bound = [(call.kernel, [view(arg) for arg in call.args]) for call in calls]
        return self._accelerator.bind(bound, () if function in ONE_TOKEN_EACH else _breaks(calls))

    def run(self, function: str, tokens: Ids, position: int, slot: int) -> None:
        """Run a step for consecutive tokens of the sequence in `slot`, the first of them at `position`."""
        count = len(tokens)
        self._step[:3] = count, position, slot
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(position, position + count)
        self._call(function)

    def run_one(self, token: int, position: int, slot: int) -> None:
        """Run a step of `decode` for one token, with less to prepare than `run` has."""
        step = self._step
        step[0], step[1], step[2] = 1, position, slot
        self._tokens[0], self._positions[0] = token, position
        self._call("decode")

    def run_sequences(self, tokens: Ids, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Run a step of `batch`: the next token of several sequences, each with its own slot and position."""
        count = len(tokens)
        self._step[:3] = count, 0, 0
        self._tokens[:count], self._positions[:count], self._slots[:count] = tokens, positions, slots
        self._call(BATCH)

    def logits(self, function: str, rows: int, copy: bool = True, first: int = 0) -> Logits:
        """Return the logits of the latest step of `function` from row `first` on, float32 [rows, vocab].

        Without `copy` this is the memory that the next step writes to, unless it is the accelerator's: logits there are
        always copied.
        """
        name, vocab = self._program.logits[function], self._program.vocab
        if self._accelerator is not None and self._program.memories["buffer", name] == "accelerator":
            memory, offset = self._accelerator_layout.places["buffer", name]
            of_accelerator = np.empty((rows, vocab), np.float32)
            self._accelerator.read(memory, offset + first * vocab * 4, of_accelerator.reshape(-1).view(np.uint8))
            return of_accelerator
        logits: Logits = self.buffers[name][first : first + rows]
        return logits.copy() if copy else logits

    def top_logits(self, function: str, row: int) -> TopScores | None:
        """Return a copy of the top logits in a row of the latest step of `function`; None if it picks none.

        The accelerator picks them where the logits stay in its memory.
        """
        if function not in self._program.top_logits:
            return None
        names = self._program.top_logits[function]
        scores, ids = self.buffers[names.scores][row].copy(), self.buffers[names.ids][row].copy()
        return TopScores(scores, ids, len(ids) == self._program.vocab)

    def counts(self, name: str) -> NDArray[np.int64] | None:
        """Return what kernels have counted in the buffer `name`, int64 [parts, 2]; None if there is no such buffer."""
        if name not in self.buffers:
            return None
        counts: NDArray[np.int64] = self.buffers[name].copy()
        if self._accelerator is not None:
            memory, offset = self._accelerator_layout.places["buffer", f"{name}.accelerator"]
            of_accelerator = np.zeros(counts.nbytes, np.uint8)
            self._accelerator.read(memory, offset, of_accelerator)
            counts += of_accelerator.view(np.int64).reshape(counts.shape)
        return counts

    def forget_counts(self, name: str) -> None:
        """Set the counters in the buffer `name` to 0."""
        if name not in self.buffers:
            return
        self.buffers[name][:] = 0
        if self._accelerator is not None:
            memory, offset = self._accelerator_layout.places["buffer", f"{name}.accelerator"]
            self._accelerator.write(memory, offset, np.zeros(self.buffers[name].nbytes, np.uint8))

    def start_timing(self, slowly: bool = False) -> None:
        """Measure every call from now on. An accelerator that this makes slower is measured only with `slowly`."""
        timed = self._accelerator is not None and (slowly or not self._accelerator.slow_stamps)
        self._times = CallTimes(self._program, ("host", "accelerator") if timed else ("host",))

    def stop_timing(self) -> None:
        """Stop measuring, and forget the times."""
        self._times = None

    def timing(self, function: str) -> list[tuple[Call, float]]:
        """Return the calls of a function, each with its seconds since `start_timing`; 0 for calls not measured."""
        return self._timed(function).seconds(function)

    def spans(self, function: str) -> list[CallSpan]:
        """Return when the calls of the latest step of a function ran."""
        return self._timed(function).spans(function)

    def _timed(self, function: str) -> CallTimes:
        if self._times is None:
            raise RequestError(f"no times were measured for {function!r}; call start_timing() first")
        return self._times

    def after_fork(self) -> str | None:
        """Adapt to being in a forked process. Return why it can run no step, None if it can."""
        reason = None if self._accelerator is None else self._accelerator.after_fork()
        if reason is not None:
            self._accelerator = None  # the memory that it shared with the host is not in this process
            self.close()
        return reason

    def close(self) -> None:
        """Free the memory and unload the code."""
        if self._accelerator is not None:
            if "abandoned" in self.buffers:  # a step that was interrupted may still be waiting
                self._abandoned[0] = 1
            # Before any memory is freed that it sees.
            self._accelerator.close()
            self._accelerator = None
        self._host_calls, self._accelerator_calls, self.buffers, self._weights = {}, {}, {}, None
        self.states = ()
        self._step = self._tokens = self._positions = self._slots = np.empty(0, np.int32)
        self.library.close()

    def _call(self, function: str) -> None:
        self._step_of(function)
        if self._times is not None:
            self._times.add(function)

    def _step_of(self, function: str) -> None:
        times = self._times
        stamps = None if times is None else times.stamps(function, "host")
        if self._accelerator is None:
            self.library.run(self._host_calls[function], self._threads, stamps)
            return
        self._step[3] = self._step[3] % _MOST_STEPS + 1
        self._abandoned[:] = 0
        of_accelerator = None if times is None else times.stamps(function, "accelerator")
        # Without taking turns, of two engines with the same code one could run on the host and the other on the
        # accelerator, and each would wait for ever.
        with self.library.turn():
            try:
                self._accelerator.start(self._accelerator_calls[function], of_accelerator)
                self.library.run(self._host_calls[function], self._threads, stamps)
            except BaseException:
                failed_first, self._abandoned[0] = not self._abandoned[0], 1
                _await_accelerator(self._accelerator, only_wait=failed_first)
                raise
            self._accelerator.wait()
        if self._abandoned[0]:
            calls, step = self._program.functions[function], int(self._step[3])
            distance_bytes = self._program.buffers["flags"].offset - self._program.buffers["abandoned"].offset
            reason = step_timeout(
                calls, step, flags=self.buffers["flags"], abandoned=self._abandoned, distance_bytes=distance_bytes
            )
            raise KernelError(f"{function}: step timeout: {reason}")

    @property
    def _abandoned(self) -> NDArray[np.int32]:
        """int32 [16]; its first word is not 0 once a side has given up waiting."""
        abandoned: NDArray[np.int32] = self.buffers["abandoned"]
        return abandoned


def _nothing() -> None:
    """Stand in for a check that is not needed."""


def _await_accelerator(accelerator: Accelerator, only_wait: bool) -> None:
    """Wait for the accelerator after the host has failed.

    Its error is raised, unless the host failed first (`only_wait`): then the accelerator may have failed because of it.
    """
    try:
        accelerator.wait()
    except KernelError:
        if not only_wait:
            raise


def _buffers(host: HostLayout, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return the buffers that are in the host's memory, as arrays by name."""
    found = {}
    for name, tensor in tensors.items():
        if ("buffer", name) in host.places:
            memory, offset = host.places["buffer", name]
            found[name] = array_at(memory, Tensor(tensor.dtype, tensor.shape, offset))
    return found


def _shared_buffers(program: Program) -> dict[tuple[str, str], Tensor]:
    return {
        ("buffer", name): tensor
        for name, tensor in program.buffers.items()
        if program.memories["buffer", name] == "shared"
    }


def _breaks(calls: Sequence[Call]) -> list[int]:
    """Return the numbers of the calls where another `_LAYERS_TOGETHER` layers begin, without call 0."""
    found, last = list[int](), 0
    for number, call in enumerate(calls):
        if call.layer is not None and call.layer // _LAYERS_TOGETHER > last:
            last = call.layer // _LAYERS_TOGETHER
            found.append(number)
    return found


def _check_memory(program: Program, cache_tokens: int | None) -> None:
    """Raise DoesNotFitError unless the state on the host fits with all slots full, or with `cache_tokens` in them."""
    sequences = "" if program.sequences == 1 else f"{program.sequences} sequences of "
    what = f"{sequences}{program.context} tokens"
    if cache_tokens is not None and cache_tokens < program.sequences * program.context:
        what = f"{cache_tokens} tokens"
    else:
        cache_tokens = None
    check_total(host_state_bytes(program, cache_tokens) + program.arena_bytes, f"a cache for {what}")
