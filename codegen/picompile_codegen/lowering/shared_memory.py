"""Which buffers in shared memory may lie in the same place.

Host and accelerator run side by side, so the order of a function's calls does not say what has finished when. Flags
alone say so. A side that has seen a flag knows that two things have finished: all calls that the other side made before
setting it, and all calls of its own that the other side had already seen finish. A buffer may lie where another was if
all calls that use the other have finished before any call that uses this one begins, in whatever time each takes.
"""

from collections.abc import Callable, Mapping, Sequence

from picompile_codegen.cpu.kernel import WrittenKernel
from picompile_codegen.lowering.arena import Lifetime
from picompile_codegen.lowering.program import Device, ProgramCall

Kernels = Mapping[tuple[Device, str], WrittenKernel]
"""The kernels of a program, by device and name."""


def shared_overlap(calls: Sequence[ProgramCall], kernels: Kernels) -> Callable[[Lifetime, Lifetime], bool]:
    """Return a function that says whether two buffers of `calls` may be in use at the same time.

    A flag must be set by a call before those that wait for it.
    """
    numbers, known = _walk(calls, kernels)
    users: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        for name in {arg.name for arg in call.args if arg.space == "buffer"}:
            users.setdefault(name, []).append(place)

    def is_before(first: Lifetime, second: Lifetime) -> bool:
        """Return whether all calls that use `first` are over before any that uses `second`."""
        ends = {calls[place].device: numbers[place] + 1 for place in users[first.name]}
        return all(known[place].get(device, 0) >= end for place in users[second.name] for device, end in ends.items())

    return lambda one, other: not (is_before(one, other) or is_before(other, one))


def _walk(calls: Sequence[ProgramCall], kernels: Kernels) -> tuple[list[int], list[Mapping[Device, int]]]:
    """Return, for each call, its number among those of its device, and how many calls of each device are over by
    then."""
    done: dict[Device, int] = {}
    knows: dict[Device, dict[Device, int]] = {}
    at_flag: dict[int, Mapping[Device, int]] = {}
    numbers, known = list[int](), list[Mapping[Device, int]]()
    for call in calls:
        device, given = call.device, list(zip(call.args, kernels[call.device, call.kernel].arguments, strict=True))
        here = knows.setdefault(device, {})
        # Nobody waits for values where a count says that there are none.
        if not any(argument.name == "count" for _, argument in given):
            for arg in (arg for arg, argument in given if argument.access == "awaits"):
                for each, count in at_flag[arg.offset].items():
                    here[each] = max(here.get(each, 0), count)
        here[device] = done.get(device, 0)
        numbers.append(here[device])
        known.append(dict(here))
        done[device] = here[device] + 1
        for arg in (arg for arg, argument in given if argument.access == "sets"):
            at_flag[arg.offset] = here | {device: done[device]}
    return numbers, known
