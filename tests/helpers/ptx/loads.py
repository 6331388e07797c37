"""Which parameters a launch reads and writes, and how: a static check, without running it.

`ld.global.nc` reads through a cache for memory that nobody changes while the kernel runs. It must not read a parameter
that the launch also writes, or one that somebody else writes meanwhile, which is why other loads of it are volatile.
Nor may a plain ("weak") load read the latter: ptxas may move it in front of the wait, or take a value from the cache
of the multiprocessor.

Which parameter an address belongs to is found by following registers from `ld.param` on. Two parameters may still be
one buffer: the program decides that, not the kernel.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from helpers.ptx.memory import access_of
from helpers.ptx.syntax import Instruction, PtxKernel

_REGISTER = re.compile(r"%[a-z]+\d+")
# Instructions that use memory; `ldmatrix` reads shared memory alone.
_MEMORY = re.compile(r"(?:ld(?!\.param\.)|st|atom|red|cp\.async\.[cb]\w*|multimem|ldu|prefetch)\.")
# What a launch does with a parameter is one of these, or "constant", "volatile ld", or "weak", a plain load.
_WRITES = frozenset({"volatile st", "store", "atomic"})

Roots = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Loads:
    """The kinds of access to each parameter, and how many instructions read memory volatile."""

    kinds: Mapping[str, frozenset[str]]
    volatile_loads: int


@dataclass(frozen=True)
class LaunchRole:
    """The parameters of a launch: their names as arguments, and those that the other side writes."""

    names: Sequence[str] = ()
    from_host: frozenset[str] = field(default_factory=frozenset)


def loads_of(kernel: PtxKernel) -> Loads:
    """Return what `kernel` does with each parameter.

    Raises `PtxError` for an address in global memory that no parameter leads to, and for accesses that are not known.
    """
    roots = _roots(kernel)
    kinds: dict[str, set[str]] = {name: set() for name in kernel.parameters}
    volatile_loads = 0
    for at in kernel.instructions():
        access = access_of(at)
        if access is None and _MEMORY.match(at.opcode):
            raise at.error("it is not known what this reads or writes")
        if access is None or access.space != "global":
            continue
        found = frozenset[str]().union(*(roots.get(name, ()) for name in _REGISTER.findall(access.address)))
        if not found:
            raise at.error("no parameter leads to this address")
        for name in found:
            kinds[name].add(access.kind)
        volatile_loads += access.kind == "volatile ld"
    return Loads({name: frozenset(each) for name, each in kinds.items()}, volatile_loads)


def wrong_loads(kernel: PtxKernel, role: LaunchRole | None = None) -> list[str]:
    """Return a line for each parameter that is read in a way that may give an old value."""
    role = role or LaunchRole()
    found = []
    for place, (parameter, kinds) in enumerate(loads_of(kernel).kinds.items()):
        name = role.names[place] if place < len(role.names) else parameter
        changes = kinds & (_WRITES | {"volatile ld"})
        if "constant" in kinds and changes:
            found.append(f"{kernel.name}: {name}: ld.global.nc, but also {', '.join(sorted(changes))}")
        if "weak" in kinds and "volatile ld" in kinds:
            found.append(f"{kernel.name}: {name}: plain loads, but also volatile ones")
        if name in role.from_host and kinds & {"constant", "weak"}:
            found.append(f"{kernel.name}: {name}: the host writes it meanwhile, and not all loads are volatile")
    return found


def _roots(kernel: PtxKernel) -> Roots:
    """Return the parameters from which each register may be computed, whatever the order of the instructions."""
    flows = [flow for at in kernel.instructions() if (flow := _flow(at))]
    roots: dict[str, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for targets, sources, parameter in flows:
            found = frozenset(parameter).union(*(roots.get(name, ()) for name in sources))
            for target in targets:
                if not found <= roots.get(target, frozenset()):
                    roots[target] = roots.get(target, frozenset()) | found
                    changed = True
    return roots


def _flow(at: Instruction) -> tuple[list[str], list[str], tuple[str, ...]] | None:
    """Return the registers that an instruction writes and reads, and the parameter that it loads, if any.

    What is loaded from other memory is a number, never an address.
    """
    if at.opcode == "ld.param.u64":
        return [at.operands[0]], [], (at.operands[1].strip("[]"),)
    if access_of(at) or not at.operands:
        return None
    target, *sources = at.operands
    read = [name for source in sources for name in _REGISTER.findall(source)]
    return (_REGISTER.findall(target), read, ()) if read else None
