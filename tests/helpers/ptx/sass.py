"""The machine code of CUDA kernels: its inner loops over weights, and which pipe their instructions go to."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# The integer pipe ("ALU" in Nsight Compute) takes a warp every second cycle, as the throughput table of the CUDA C++
# Programming Guide has it: 64 results a cycle for shifts, logic, comparisons and additions of integers, 128 for float32
# (7.5 and 8.0 have 64 of those, too). Integer multiply-adds, IMAD, go to the pipe of float32. Instructions whose names
# begin with U are computed once for the whole warp, by another pipe.
HALF_RATE = frozenset(
    {
        "BMSK",
        "FMNMX",
        "FSEL",
        "FSET",
        "FSETP",
        "IABS",
        "IADD",
        "IADD3",
        "IMNMX",
        "ISETP",
        "LEA",
        "LOP",
        "LOP3",
        "MOV",
        "P2R",
        "PLOP3",
        "PRMT",
        "R2P",
        "SEL",
        "SGXT",
        "SHF",
        "SHL",
        "SHR",
        "VABSDIFF",
        "VIADD",
        "VIADDMNMX",
        "VIMNMX",
    }
)
# A read of 16 bytes of weights. What is read from shared memory is LDS.
_READ = "LDG.E.128"
_READ_BITS = 128

_LINE = re.compile(r"^(\.L\w+):|/\*[0-9a-f]{4,}\*/ +(.*?) *;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*\((\.L\w+)\)")
_GUARD = re.compile(r"^@!?U?P\w+ +")


@dataclass(frozen=True)
class Count:
    """Instructions of a loop that multiplies `weights` weights."""

    weights: int
    operations: Mapping[str, int]

    def per(self, weights: int) -> tuple[float, float]:
        """(all, those of the integer pipe) for so many weights."""
        share = weights / self.weights
        integer = sum(count for name, count in self.operations.items() if name in HALF_RATE)
        return sum(self.operations.values()) * share, integer * share


def disassemble(cubin: Path) -> dict[str, str]:
    """The text of each function in a cubin."""
    spec = find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    tools = [tool for folder in folders for tool in Path(folder).glob("*/bin/nvdisasm")]
    if not tools:
        raise FileNotFoundError("no nvdisasm: pip install nvidia-cuda-nvdisasm, of the extra dev")
    done = subprocess.run([tools[0], "-c", cubin], capture_output=True, text=True, check=True)
    sections = re.split(r"\n\s*\.section\s+\.text\.", done.stdout)[1:]
    return {section.partition(",")[0]: section for section in sections}


def weight_loops(text: str, bits: int) -> list[Count]:
    """Each innermost loop of a function that reads weights of so many bits 16 bytes at a time, in their order.

    A loop that computes the last units of a row, for which there is no full turn, is one of its own where there is one.
    """
    found = []
    for loop in innermost_loops(text):
        reads = sum(_operation(line).startswith(_READ) for line in loop)
        operations = Counter(_operation(line).partition(".")[0] for line in loop)
        found.append(Count(reads * _READ_BITS // bits, operations))
    return found


def operations(text: str) -> list[str]:
    """Return the operations of a function with their modifiers, in the order of the code, as `LDG.E.128`."""
    return [_operation(instruction) for _, instruction in _LINE.findall(text) if instruction]


def _operation(instruction: str) -> str:
    return _GUARD.sub("", instruction).partition(" ")[0]


def innermost_loops(text: str, operation: str = _READ) -> Iterator[list[str]]:
    """The instructions from the target of each branch backwards to the branch, where there is `operation` in between:
    weights are read, unless it is given."""
    places: dict[str, int] = {}
    code: list[str] = []
    for label, instruction in _LINE.findall(text):
        if label:
            places[label] = len(code)
        else:
            code.append(instruction)
    loops = []
    for at, instruction in enumerate(code):
        branch = _BRANCH.search(instruction)
        start = places.get(branch[1], at) if branch else at
        if start < at and any(_operation(line).startswith(operation) for line in code[start : at + 1]):
            loops.append((start, at))
    for start, stop in loops:
        if not any((a, b) != (start, stop) and start <= a and b <= stop for a, b in loops):
            yield code[start : stop + 1]
