"""Checks each call of a program against its kernel's interface: dtypes, shapes, and what is written where.

Kernels trust their arguments, so calls must match what kernels declare: a weight is only read, a parameter for
state is given state and one for counters is given counters, and a kernel is made for as many rows, positions and
slots as the steps of the function have. `call_order` then checks what the arguments contain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from picompile_runtime.artifact.interfaces import KernelInterface, KernelParameter
from picompile_runtime.artifact.program import BATCH, UPLOAD_OP, WAITING_OPS, Argument, Call, Program
from picompile_runtime.devices.memory import ALIGNMENT
from picompile_runtime.errors import ArtifactError

Range = Callable[[Argument], tuple[int, int]]
"""Returns the lowest and the highest integer of a weight."""

# Buffers that the runtime itself writes, or that kernels count and signal in; no kernel may write results there.
INPUTS = ("step", "tokens", "positions", "slots")
_COUNTERS = ("stats", "stats.batch", "stats.unused")
_FLAGS = {"sets": "flags", "awaits": "flags", "abandons": "abandoned"}
_TICKETS = "tickets"
_FLAG_BYTES = 64
_COUNTER_BYTES = 16  # int64 [2]


def check_calls(
    program: Program, device: str, kernels: Mapping[str, KernelInterface], numbers: Range, where: str
) -> None:
    """Check all calls of a program that run on `device`, whose code has `kernels`. Raises ArtifactError."""
    checked: set[tuple[Argument, int]] = set()
    for function in program.functions:
        for number, call in enumerate(program.calls(function, device)):
            interface = kernels.get(call.kernel)
            fault = "has no interface" if interface is None else _fault(program, function, call, interface, numbers)
            if interface is not None and not fault:
                fault = _number_fault(call, interface, numbers, checked)
            if fault:
                place = f"{function}, call {number} on the {device}"
                raise ArtifactError(f"{where}: {place}: {call.kernel} {fault}")


def _fault(program: Program, function: str, call: Call, interface: KernelInterface, numbers: Range) -> str:
    """Return what is wrong with a call, an empty text if nothing is."""
    if len(call.args) != len(interface.parameters):
        return f"takes {len(interface.parameters)} arguments, and is given {len(call.args)}"
    shares, fault = _counted_shares(call, interface, numbers)
    if fault:
        return fault
    for argument, parameter in zip(call.args, interface.parameters, strict=True):
        view, shape = argument.view, parameter.shape
        if parameter.counted is not None:
            count, most = shares[parameter.counted]
            shape = (shape[0] * count // most, *shape[1:])
        if (view.dtype, view.shape) != (parameter.dtype, shape):
            found = f"{view.dtype} {list(view.shape)}"
            return f"takes {parameter.name} {parameter.dtype} {list(shape)}, and is given {found}"
        if view.offset % (_COUNTER_BYTES if parameter.access == "adds" else ALIGNMENT):
            return f"is given {argument.name} at byte {view.offset}, which is no multiple of {ALIGNMENT}"
        if fault := _place_fault(argument, parameter):
            return fault
    if any(parameter.access == "awaits" for parameter in interface.parameters) and call.op not in WAITING_OPS:
        return f"waits for a flag, which a call of {call.op!r} may not"
    if call.op == UPLOAD_OP and any(
        parameter.access == "in" and parameter.name != "step" and argument.kind != "weight"
        for argument, parameter in zip(call.args, interface.parameters, strict=True)
    ):
        return "uploads something else than a weight, of which nothing says when it is complete"
    if call.op == UPLOAD_OP and any(
        parameter.writes and program.memories.get((argument.kind, argument.name)) != call.device
        for argument, parameter in zip(call.args, interface.parameters, strict=True)
    ):
        return "uploads to memory that is not its device's own, where nothing says when it is complete"
    return _step_fault(program, function, interface) or _overlap_fault(program, call, interface)


def _counted_shares(
    call: Call, interface: KernelInterface, numbers: Range
) -> tuple[Mapping[str, tuple[int, int]], str]:
    """Return, for each parameter that counts others, its number and the largest that the kernel takes; and a fault."""
    shares = {}
    for name in {parameter.counted for parameter in interface.parameters if parameter.counted is not None}:
        found = [
            (argument, parameter)
            for argument, parameter in zip(call.args, interface.parameters, strict=True)
            if parameter.name == name
        ]
        argument, most = (found[0][0], (found[0][1].below or 1) - 1) if found else (None, 0)
        if argument is None or argument.kind != "weight" or argument.view.dtype != "int32":
            return {}, f"is given no weight of int32 for {name}"
        lowest, highest = numbers(argument)
        if not 1 <= lowest == highest <= most:
            return {}, f"takes a number from 1 to {most} for {name}, and {argument.name} has {lowest} to {highest}"
        shares[name] = highest, most
    return shares, ""


def _place_fault(argument: Argument, parameter: KernelParameter) -> str:
    name, access = argument.name.removesuffix(".accelerator"), parameter.access
    if parameter.name == "step":
        expected = argument.kind == "buffer"
    elif access == "state" and argument.kind == "buffer":
        # A copy of state in a device's own memory; `call_order` checks that it is one.
        expected = name not in (*INPUTS, *_COUNTERS, *_FLAGS.values(), _TICKETS)
    elif access == "state" or argument.kind == "state":
        expected = access == "state" and argument.kind == "state"
    elif argument.kind == "weight":
        expected = access == "in"
    elif access == "adds":
        expected = name in _COUNTERS
    elif access == "tickets":
        expected = argument.name == _TICKETS
    elif access in _FLAGS:
        expected = argument.name == _FLAGS[access] and argument.view.offset % _FLAG_BYTES == 0
    elif parameter.writes and (name in INPUTS or name in (*_COUNTERS, *_FLAGS.values(), _TICKETS)):
        # The accelerator has copies of the inputs, which each step makes anew.
        expected = parameter.copies is not None and name in INPUTS and argument.name != name
    else:
        expected = True
    return "" if expected else f"may not be given {argument.kind} {argument.name} for {parameter.name} ({access})"


def _step_fault(program: Program, function: str, interface: KernelInterface) -> str:
    rows = program.rows(function)
    if interface.tokens not in (0, 1, rows):
        return f"is made for steps of {interface.tokens} tokens, and here they have {rows}"
    if interface.positions and (function == BATCH or interface.positions != program.context):
        return f"is made for one sequence of {interface.positions} positions"
    if interface.slots and (function == BATCH or interface.slots != program.sequences):
        return f"is made for {interface.slots} sequences, one a step"
    by_row = any(parameter.access == "state" for parameter in interface.parameters)
    # A kernel without rows copies what the state has from steps before.
    if by_row and interface.tokens not in (0, rows):
        return f"is made for {interface.tokens} rows of state, and steps have {rows}"
    return ""


def _overlap_fault(program: Program, call: Call, interface: KernelInterface) -> str:
    """Return which argument overlaps one that the kernel writes: kernels are compiled for tensors that do not."""
    given = sorted(
        (arena_of(program, argument), *span_of(program, argument), parameter.writes, parameter.name)
        for argument, parameter in zip(call.args, interface.parameters, strict=True)
        if argument.kind != "weight"
    )
    # The end of all arguments that have begun so far, and of those that are written.
    arena, end, end_written = "", 0, 0
    for memory, start, stop, writes, name in given:
        if memory != arena:
            arena, end, end_written = memory, 0, 0
        if start < (end if writes else end_written):
            return f"is given {name} where another of its arguments is"
        end, end_written = max(end, stop), max(end_written, stop if writes else 0)
    return ""


def arena_of(program: Program, argument: Argument) -> str:
    """Return the memory that an argument is in: host, device or shared, or a state tensor's own."""
    if argument.kind == "state":
        return f"state {argument.name}"
    return program.memories[argument.kind, argument.name]


def span_of(program: Program, argument: Argument) -> tuple[int, int]:
    """Return where an argument begins and ends in its memory, in bytes."""
    base = program.buffers[argument.name].offset if argument.kind == "buffer" else 0
    start = base + argument.view.offset
    return start, start + argument.view.size_bytes


def _number_fault(call: Call, interface: KernelInterface, numbers: Range, checked: set[tuple[Argument, int]]) -> str:
    """Return which weight has integers that the kernel would use as indices out of range, an empty text if none."""
    for argument, parameter in zip(call.args, interface.parameters, strict=True):
        if parameter.below is None or argument.kind != "weight" or (argument, parameter.below) in checked:
            continue
        if not argument.view.dtype.startswith(("int", "uint")):
            return f"takes {parameter.name} as indices, and {argument.name} has {argument.view.dtype}"
        lowest, highest = numbers(argument)
        if lowest < 0 or highest >= parameter.below:
            range_ = f"from {lowest} to {highest}"
            return f"takes numbers below {parameter.below} for {parameter.name}, and {argument.name} has {range_}"
        checked.add((argument, parameter.below))
    return ""
