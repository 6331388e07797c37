"""Operands as C++: registers, literals, addresses of shared arrays.

A register is a C++ variable of its size. `ptx_as` of ptx.h copies bits between types of one size, so an instruction
sees a register as what its type says.
"""

import re
from dataclasses import dataclass, field

from helpers.ptx.syntax import C_TYPES, REGISTER_TYPES, Instruction, PtxKernel

# "Special Registers": what they are in the emulation, whose blocks have one dimension here.
_SPECIAL = {
    "%tid.x": "emulated_thread.x",
    "%ntid.x": "emulated_block_size.x",
    "%ctaid.x": "emulated_block.x",
    "%ctaid.y": "emulated_block.y",
    "%nctaid.x": "emulated_grid_size.x",
    "%nctaid.y": "emulated_grid_size.y",
    "%laneid": "emulated_lane()",
    "%globaltimer": "emulated_now_ns()",
}
_NUMBERED = re.compile(r"(%[a-z]+)(\d+)")
_INTEGER = re.compile(r"-?\d+|0x[0-9A-Fa-f]+")
_FLOAT = re.compile(r"0f([0-9A-Fa-f]{8})")
_SYMBOL = re.compile(r"([$\w]+)(?:\+(\d+))?")
_ADDRESS = re.compile(r"\[(%\w+|[$A-Za-z_][$\w]*)(?:\+(-?\d+))?\]")


def bits_of(type_name: str) -> int:
    """Return the size of a type in bits; that of a predicate is 1."""
    return 1 if type_name == "pred" else 32 if type_name == "f16x2" else int(type_name[1:])


@dataclass
class Frame:
    """The registers of a kernel while it is translated: `used` are the variables that it needs, with their types."""

    kernel: PtxKernel
    used: dict[str, str] = field(default_factory=dict)

    def read(self, at: Instruction, operand: str, type_name: str) -> str:
        """Return an expression of the C type of `type_name`: of a register that is wider the low bits.

        Raises `PtxError` for an operand that is not known; `ptx_as` does not compile for registers that are narrower.
        """
        if operand in _SPECIAL:
            return f"({C_TYPES[type_name]}){_SPECIAL[operand]}"
        if operand.startswith("%") or operand in self.kernel.named:
            name, own = self._register(at, operand)
            return name if C_TYPES[own] == C_TYPES[type_name] else f"ptx_as<{C_TYPES[type_name]}>({name})"
        return self._literal(at, operand, type_name)

    def write(self, at: Instruction, operand: str, type_name: str, value: str) -> str:
        """Return the statement that gives a register a value of `type_name`; one that is wider extends it."""
        name, own = self._register(at, operand)
        typed = f"({C_TYPES[type_name]})({value})"
        if bits_of(own) > bits_of(type_name):
            return f"{name} = ({C_TYPES[own]}){typed};"
        return (
            f"{name} = {typed};" if C_TYPES[own] == C_TYPES[type_name] else f"{name} = ptx_as<{C_TYPES[own]}>({typed});"
        )

    def address(self, at: Instruction, operand: str, space: str) -> str:
        """Return the pointer that `[register + offset]` is, as `char *`."""
        match = _ADDRESS.fullmatch(operand.replace(" ", ""))
        if match is None:
            raise at.error(f"{operand} is no address")
        offset = f" + ({match[2]})" if match[2] else ""
        if not match[1].startswith("%"):
            if space != "shared":
                raise at.error("only shared memory has names")
            base = self._literal(at, match[1], "u64")
        else:
            name, own = self._register(at, match[1])
            if own not in (("b32", "b64") if space == "shared" else ("b64",)):
                raise at.error(f"{match[1]} is no address")
            base = name
        if space == "shared":
            return f"ptx_shared(ptx_window, {self.kernel.shared_bytes}, (uint64_t){base}{offset})"
        return f"(char *)({base}{offset})"

    def _register(self, at: Instruction, operand: str) -> tuple[str, str]:
        """Return the variable of a register, and the type that it was declared with."""
        if operand in self.kernel.named:
            return operand, self.kernel.named[operand]
        match = _NUMBERED.fullmatch(operand)
        own, count = self.kernel.registers.get(match[1], ("", 0)) if match else ("", 0)
        if match is None or int(match[2]) >= count or own not in REGISTER_TYPES:
            raise at.error(f"{operand} is no register")
        name = operand.removeprefix("%")
        self.used[name] = own
        return name, own

    def _literal(self, at: Instruction, operand: str, type_name: str) -> str:
        bits = bits_of(type_name)
        if found := _FLOAT.fullmatch(operand):
            if bits != 32:
                raise at.error(f"{operand} is a float")
            return f"ptx_as<{C_TYPES[type_name]}>(0x{found[1]}u)"
        if _INTEGER.fullmatch(operand):
            value = int(operand, 0)
            lowest, highest = (-1, 1) if type_name == "pred" else (-(1 << bits - 1), (1 << bits) - 1)
            if type_name == "f32" or not lowest <= value <= highest:
                raise at.error(f"{operand} is no .{type_name}")
            return f"({C_TYPES[type_name]}){value % 2**64}ull" if bits > 1 else ("true" if value else "false")
        symbol = _SYMBOL.fullmatch(operand)
        if symbol is None or symbol[1] not in self.kernel.shared or type_name not in ("u32", "b32", "u64", "b64"):
            raise at.error(f"{operand} is not known")
        return f"({C_TYPES[type_name]}){self.kernel.shared[symbol[1]] + int(symbol[2] or 0)}"
