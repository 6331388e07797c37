"""Checks what the arguments of a program's calls contain when each call runs, by walking each function without data.

Buffers share memory, and host and accelerator run at the same time. The walk shows for every argument that is read
that one call wrote all of it before and that nothing has overwritten it since; that a flag ensures the order of each
transfer between host and accelerator, also where shared memory is written again; and that every wait ends. So no kernel
uses as indices what are none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from picompile_runtime.artifact.call_checks import INPUTS, arena_of, check_calls, span_of
from picompile_runtime.artifact.interfaces import KernelInterface, KernelParameter
from picompile_runtime.artifact.manifest import PROGRAM
from picompile_runtime.artifact.program import BATCH, DEVICES, UPLOAD_OP, Argument, Call, Program
from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.devices.cpu.native import HostLibrary
from picompile_runtime.devices.open_accelerator import accelerator_kind
from picompile_runtime.errors import ArtifactError

# A kernel that waits for values takes this, where it does not wait for none of them.
_SKIPS = "count"

Interfaces = Mapping[str, Mapping[str, KernelInterface]]
"""The kernels of the host and of the accelerator, by device."""


def check_order(program: Program, kernels: Interfaces, where: str) -> None:
    """Check the order of all functions of a program that `check_calls` has accepted. Raises ArtifactError."""
    for function in program.functions:
        _OrderCheck(program, function, kernels).check(where)


@dataclass(frozen=True)
class _BufferValue:
    """The bytes that call `number` of `device` wrote to the buffer `name`, from `start` to `end`.

    Call -1 is the runtime itself. `source` is the input that the value is, or is a copy of; integers in it are below
    `below`. `is_bytes` of weights that were copied, whatever their type. A value `is_complete` if no rows or
    positions of it are undefined, because its kernel has one row, or none: then a call may read a part of it.
    """

    name: str
    start: int
    end: int
    device: str
    number: int
    dtype: str
    source: str | None = None
    below: int | None = None
    is_bytes: bool = False
    is_complete: bool = False


@dataclass
class _Arena:
    """Disjoint parts of a memory, in order, each with the value that it is a part of; None for scratch memory."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    values: list[_BufferValue | None] = field(default_factory=list)

    def value(self, start: int, end: int) -> _BufferValue | None:
        """Return the value that contains the bytes from `start` to `end`, None if there is none."""
        at = bisect_right(self.starts, start) - 1
        return self.values[at] if at >= 0 and self.ends[at] >= end else None

    def write(self, start: int, end: int, value: _BufferValue | None) -> None:
        """Replace everything from `start` to `end` by a value."""
        first = bisect_right(self.ends, start)
        last = first
        while last < len(self.starts) and self.starts[last] < end:
            last += 1
        parts = [(start, end, value)]
        if first < last and self.starts[first] < start:
            parts.insert(0, (self.starts[first], start, self.values[first]))
        if first < last and self.ends[last - 1] > end:
            parts.append((end, self.ends[last - 1], self.values[last - 1]))
        self.starts[first:last] = [part[0] for part in parts]
        self.ends[first:last] = [part[1] for part in parts]
        self.values[first:last] = [part[2] for part in parts]


@dataclass(frozen=True)
class _SharedUse:
    """Call `number` of `device` uses shared memory from `start` to `end`."""

    start: int
    end: int
    device: str
    number: int


class _OrderCheck:
    """Walks one function in an order that is possible for host and accelerator."""

    def __init__(self, program: Program, function: str, kernels: Interfaces) -> None:
        self._program, self._function, self._kernels = program, function, kernels
        self._arenas = {memory: _Arena() for memory in ("host", "accelerator", "shared")}
        self._uses_of_shared: list[_SharedUse] = []
        # For each flag that was set: by which device, and how many calls of each device are over by then.
        self._set: dict[int, tuple[str, dict[str, int]]] = {}
        # For each device: how many calls of each device it knows to be over. A call that waits only if a count says so
        # teaches nothing to those after it.
        self._known = {device: dict.fromkeys(DEVICES, 0) for device in DEVICES}
        for name in INPUTS if function == BATCH else INPUTS[:3]:
            if name in program.buffers:
                self._begin_with(name)

    def _begin_with(self, name: str) -> None:
        tensor = self._program.buffers[name]
        bounds = {"tokens": self._program.vocab, "positions": self._program.context, "slots": self._program.sequences}
        start, end = tensor.offset, tensor.offset + tensor.size_bytes
        value = _BufferValue(
            name, start, end, device="host", number=-1, dtype=tensor.dtype, source=name, below=bounds.get(name)
        )
        self._arenas[self._program.memories["buffer", name]].write(start, end, value)

    def check(self, where: str) -> None:
        """Walk the function. Raises ArtifactError, naming `where`."""
        calls = {device: self._program.calls(self._function, device) for device in DEVICES}
        done = dict.fromkeys(DEVICES, 0)
        before = -1
        while before < sum(done.values()):
            before = sum(done.values())
            for device in DEVICES:
                while done[device] < len(calls[device]) and self._may_run(device, calls[device][done[device]]):
                    call = calls[device][done[device]]
                    if fault := self._run(device, done[device], call):
                        place = f"{self._function}, call {done[device]} on the {device}"
                        raise ArtifactError(f"{where}: {place}: {call.kernel} {fault}")
                    done[device] += 1
        for device in DEVICES:
            if done[device] < len(calls[device]):
                waiting = calls[device][done[device]].kernel
                place = f"{self._function}, call {done[device]} on the {device}"
                raise ArtifactError(f"{where}: {place}: {waiting} waits for a flag that nobody sets")
        if missing := self._missing_result():
            raise ArtifactError(f"{where}: {self._function}: nothing whole is left in {missing}")

    def _given(self, device: str, call: Call) -> Sequence[tuple[Argument, KernelParameter]]:
        return list(zip(call.args, self._kernels[device][call.kernel].parameters, strict=True))

    def _may_run(self, device: str, call: Call) -> bool:
        """Return whether the other side has set the flags that a call waits for."""
        awaited = (argument for argument, parameter in self._given(device, call) if parameter.access == "awaits")
        return all(self._set.get(argument.view.offset, (device,))[0] != device for argument in awaited)

    def _run(self, device: str, number: int, call: Call) -> str:
        """Walk one call. Return what is wrong with it, an empty text if nothing is."""
        given = self._given(device, call)
        may_skip, seen = any(parameter.name == _SKIPS for _, parameter in given), dict(self._known[device])
        for argument, parameter in given:
            if parameter.access == "awaits":
                seen = _latest(self._set[argument.view.offset][1], seen)
        seen[device] = number
        self._known[device] = {**self._known[device], device: number} if may_skip else seen
        read: dict[str, _BufferValue] = {}
        for argument, parameter in given:
            if parameter.access == "in" and argument.kind == "buffer":
                value = self._value(device, argument, seen)
                if value is None or not (value.is_bytes or value.dtype == argument.view.dtype):
                    return f"reads {parameter.name} in {argument.name}, where nothing whole has been written before"
                if fault := self._content_fault(call, device, argument, parameter, value):
                    return fault
                read[parameter.name] = value
            if parameter.access == "state" and argument.kind == "buffer" and not self._is_copy(device, argument, seen):
                return f"is given {argument.name} for {parameter.name}, where no copy of state is"
        for argument, parameter in given:
            is_written = parameter.access in ("out", "scratch") or (
                parameter.access == "state" and argument.kind == "buffer"
            )
            if is_written and (fault := self._write(device, number, call, argument, parameter, read)):
                return fault
        for argument, parameter in given:
            if parameter.access == "sets":
                if argument.view.offset in self._set:
                    return f"sets flag {argument.view.offset // 64}, which was set before in this step"
                self._set[argument.view.offset] = device, {**self._known[device], device: number + 1}
        self._note_use(device, number, given)
        return ""

    def _note_use(self, device: str, number: int, given: Sequence[tuple[Argument, KernelParameter]]) -> None:
        for argument, _ in given:
            if argument.kind == "buffer" and arena_of(self._program, argument) == "shared":
                self._uses_of_shared.append(_SharedUse(*span_of(self._program, argument), device, number))

    def _is_copy(self, device: str, argument: Argument, seen: Mapping[str, int]) -> bool:
        """Return whether the copy of state that an argument is has been made there, whole and with its dtype."""
        span, memory = span_of(self._program, argument), arena_of(self._program, argument)
        value = self._value(device, argument, seen)
        is_whole = value is not None and (value.start, value.end, value.dtype) == (*span, argument.view.dtype)
        return is_whole and memory == device

    def _value(self, device: str, argument: Argument, seen: Mapping[str, int]) -> _BufferValue | None:
        """Return the value that a call on `device` is sure to find in an argument, None if there is none.

        `seen` says how many calls of each device are over when it reads.
        """
        start, end = span_of(self._program, argument)
        value = self._arenas[arena_of(self._program, argument)].value(start, end)
        if value is None or value.name != argument.name:
            return None
        is_over = value.device == device or value.number < seen[value.device]
        return value if is_over else None

    def _content_fault(
        self, call: Call, device: str, argument: Argument, parameter: KernelParameter, value: _BufferValue
    ) -> str:
        start, end = span_of(self._program, argument)
        if parameter.name == "step" and value.source != "step":
            return f"is given {argument.name} for its step"
        if parameter.below is not None and (value.below is None or value.below > parameter.below):
            return f"takes numbers below {parameter.below} for {parameter.name}, and {argument.name} may have others"
        # A call reads as many elements of an input as it has rows. In values that calls have written, rows beyond the
        # step's tokens are undefined: a kernel for as many rows leaves them out.
        is_part = value.start != start or (value.source is None and value.end != end)
        if is_part and (value.source is not None or value.is_bytes or not value.is_complete):
            return f"reads a part of {argument.name}"
        interface, rows = self._kernels[device][call.kernel], self._program.rows(self._function)
        copies = any(each.copies == parameter.name for each in interface.parameters)
        if value.source not in (None, "step") and not copies and interface.tokens != rows:
            return f"is made for {interface.tokens or 'no'} rows, and steps have {rows}"
        return ""

    def _write(
        self,
        device: str,
        number: int,
        call: Call,
        argument: Argument,
        parameter: KernelParameter,
        read: Mapping[str, _BufferValue],
    ) -> str:
        start, end = span_of(self._program, argument)
        memory = arena_of(self._program, argument)
        if memory == "shared" and not self._is_free(device, start, end):
            return f"writes {parameter.name} to {argument.name}, shared memory that may be in use in this step"
        value = None
        if parameter.access != "scratch":
            copied = read.get(parameter.copies or "")
            source, below = (None, parameter.below) if copied is None else (copied.source, copied.below)
            interface, is_bytes = self._kernels[device][call.kernel], call.op == UPLOAD_OP
            is_complete = interface.tokens == 1 or (interface.tokens == 0 and not interface.positions)
            value = _BufferValue(
                argument.name, start, end, device, number, parameter.dtype, source, below, is_bytes, is_complete
            )
        self._arenas[memory].write(start, end, value)
        return ""

    def _is_free(self, device: str, start: int, end: int) -> bool:
        """Return whether `device` knows that all uses of shared memory from `start` to `end` so far are over."""
        known = self._known[device]
        return all(
            use.end <= start or end <= use.start or use.number < known[use.device] for use in self._uses_of_shared
        )

    def _missing_result(self) -> str:
        """Return the first buffer that the runtime reads after the step and that has no whole value, or nothing."""
        program, function = self._program, self._function
        wanted: list[tuple[str, int | None]] = []
        if function in program.logits:
            wanted.append((program.logits[function], None))
        if function in program.top_logits:
            top = program.top_logits[function]
            wanted += [(top.scores, None), (top.ids, program.vocab)]
        for name, below in wanted:
            tensor = program.buffers[name]
            arena = self._arenas[program.memories["buffer", name]]
            value = arena.value(tensor.offset, tensor.offset + tensor.size_bytes)
            is_whole = value is not None and (value.name, value.dtype) == (name, tensor.dtype)
            if value is None or not is_whole or (below and (value.below or below + 1) > below):
                return name
        return ""


def _latest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {device: max(one[device], other[device]) for device in DEVICES}


def check_code(artifact: Artifact, library: HostLibrary) -> None:
    """Check every call of an artifact's program against its kernels, before any code runs.

    The kernels are those of `library` and of the accelerator's code. A library without a table of its kernels was not
    made by `picompile compile`, and is not checked. Raises ArtifactError for a call that its kernel was not made for.
    """
    of_host = library.interfaces()
    if of_host is None:
        return

    def numbers(argument: Argument) -> tuple[int, int]:
        weight = artifact.weight(argument)
        return int(weight.min()), int(weight.max())

    program, where = artifact.program, str(artifact.folder / PROGRAM)
    kernels = {"host": of_host, "accelerator": _accelerator_interfaces(artifact) if program.has_accelerator else {}}
    for device, table in kernels.items():
        check_calls(program, device, kernels=table, numbers=numbers, where=where)
    check_order(program, kernels, where)


def _accelerator_interfaces(artifact: Artifact) -> Mapping[str, KernelInterface]:
    found = accelerator_kind(artifact).interfaces(artifact)
    if found is None:
        raise ArtifactError(
            f"{artifact.folder}: the accelerator's code does not say what its kernels are; compile it again"
        )
    return found
