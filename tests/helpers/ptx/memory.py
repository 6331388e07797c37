"""Loads, stores, copies and atomics as C++. The emulation checks each access: alignment, bounds, races."""

import re
from dataclasses import dataclass

from helpers.ptx.operands import Frame
from helpers.ptx.syntax import C_TYPES, Instruction, elements

_ACCESS = re.compile(r"(ld|st)(\.volatile)?\.(global|shared)(\.nc)?(?:\.v([24]))?\.([bsu](?:8|16|32|64)|f32)")
# By what follows `atom.` or `red.`: the emulation's function, and the type of memory.
ATOMICS = {
    "global.add.u32": ("atomicAdd", "unsigned"),
    "global.add.u64": ("atomicAdd", "unsigned long long"),
    "global.inc.u32": ("atomicInc", "unsigned"),
    "acq_rel.gpu.global.inc.u32": ("pi_inc_acq_rel_gpu", "unsigned"),
}
_ATOMIC = re.compile(r"(atom|red)\.((?:acq_rel\.gpu\.)?global\.\w+\.(u32|u64))")
# A store that others see only behind all that came before it. It is as strong as a volatile one.
_RELEASE = "st.release.sys.global.s32"
_COPY = "cp.async.cg.shared.global"
_COPY_BYTES = "16"


@dataclass(frozen=True)
class Access:
    """`kind` is what an instruction does at its address: see loads.py. `values` may be a vector."""

    kind: str
    space: str
    address: str
    values: tuple[str, ...] = ()
    type: str = ""


def access_of(at: Instruction) -> Access | None:
    """Return what an instruction does to memory, or None if it is no access to memory that is known."""
    if found := _ACCESS.fullmatch(at.opcode):
        verb, is_volatile, space, constant, width, type_name = found.groups()
        if (constant and (is_volatile or space == "shared" or verb == "st")) or (is_volatile and width):
            return None
        values, address = at.operands if verb == "ld" else reversed(at.operands)
        names = tuple(elements(values))
        if len(names) != int(width or 1):
            raise at.error(f"{len(names)} values")
        kind = "store" if verb == "st" else "constant" if constant else "weak"
        return Access(f"volatile {verb}" if is_volatile else kind, space, address, names, type_name)
    if (found := _ATOMIC.fullmatch(at.opcode)) and found[2] in ATOMICS:
        has_result = found[1] == "atom"
        return Access("atomic", "global", at.operands[has_result], at.operands[:has_result], found[3])
    if at.opcode == _COPY:
        return Access("weak", "global", at.operands[1])
    if at.opcode == _RELEASE:
        return Access("volatile st", "global", at.operands[0], (at.operands[1],), "s32")
    return None


def translate_access(frame: Frame, at: Instruction, access: Access) -> str:
    """Return the statement of an instruction that `access_of` knows."""
    if at.opcode == _COPY:
        return _copy(frame, at)
    place = frame.address(at, access.address, access.space)
    if access.kind == "atomic":
        return _atomic(frame, at, access, place)
    if at.opcode == _RELEASE:
        return f"pi_store_release_sys((int *){place}, {frame.read(at, access.values[0], access.type)});"
    is_load, c_type = at.opcode.startswith("ld"), C_TYPES[access.type]
    if len(access.values) > 1:
        return _vector(frame, at, access, place)
    where = f"*({'volatile ' if 'volatile' in access.kind else ''}{c_type} *){place}"
    if is_load:
        return frame.write(at, access.values[0], access.type, where)
    return f"{where} = {frame.read(at, access.values[0], access.type)};"


def _vector(frame: Frame, at: Instruction, access: Access, place: str) -> str:
    """Return a load or store of several values, all of which are read before one register changes."""
    vector = f"PtxVector{len(access.values)}<{C_TYPES[access.type]}>"
    if at.opcode.startswith("ld"):
        written = (frame.write(at, name, access.type, f"loaded.e[{i}]") for i, name in enumerate(access.values))
        return f"{{ {vector} loaded = *({vector} *){place}; {' '.join(written)} }}"
    read = ", ".join(frame.read(at, name, access.type) for name in access.values)
    return f"*({vector} *){place} = {vector}{{{{{read}}}}};"


def _atomic(frame: Frame, at: Instruction, access: Access, place: str) -> str:
    function, c_type = ATOMICS[at.opcode.partition(".")[2]]
    call = f"{function}(({c_type} *){place}, ({c_type}){frame.read(at, at.operands[-1], access.type)})"
    return frame.write(at, access.values[0], access.type, call) if access.values else f"{call};"


def _copy(frame: Frame, at: Instruction) -> str:
    """Return a copy of 16 bytes to shared memory, or of as many as the last operand says and zeros behind these."""
    target, source, size, *rest = at.operands
    if size != _COPY_BYTES or len(rest) > 1:
        raise at.error("copies of 16 bytes are known")
    count = frame.read(at, rest[0], "u32") if rest else _COPY_BYTES
    to, of = frame.address(at, target, "shared"), frame.address(at, source, "global")
    return f"emulated_copy_async({to}, {of}, {count});"
