"""A lint of machine code (SASS): local memory, and loads that must see what the host wrote.

How `pi_wait_for` of prelude.cuh looks in machine code: a loop with NANOSLEEP reads both flags by LDG.E.STRONG.SYS;
behind it MEMBAR.ALL.SYS orders later loads, and CCTL.IVALL empties the cache of the multiprocessor. Loads of what the
host wrote are volatile in the PTX, and then LDG.E.STRONG.SYS.
"""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from helpers.ptx.device_code import DeviceCode
from helpers.ptx.loads import loads_of
from helpers.ptx.sass import disassemble, innermost_loops, operations
from helpers.ptx.syntax import PtxKernel
from picompile_codegen.cuda.build import function_resources

LATER_PTXAS = Path("/usr/local/bin/ptxas")
LATER_RELEASE = 13
# Registers that a function may take more with the later release; a spill is never right.
MOST_MORE_REGISTERS = 4
_LOCAL = ("LDL", "STL")
_STRONG_LOAD = re.compile(r"LDG\.E.*\.STRONG\.SYS")
_FENCE = re.compile(r"MEMBAR\..*SYS")
_SLEEP, _EMPTY_CACHE = "NANOSLEEP", "CCTL.IVALL"
# Between a fence and what empties the cache are checks for errors alone.
_MOST_BETWEEN = 4


def machine_faults(code: DeviceCode, kernels: list[PtxKernel]) -> list[str]:
    """Return a line for each fault in the cubin of `code`, whose PTX has `kernels`."""
    functions, resources = functions_of(code.cubin), function_resources(code.cubin)
    return [
        f"{kernel.name}: {fault}"
        for kernel in kernels
        for fault in function_faults(
            functions[kernel.name], loads_of(kernel).volatile_loads, resources[kernel.name].local_bytes
        )
    ]


def functions_of(cubin: bytes) -> dict[str, str]:
    """Return the machine code of each function as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.cubin"
        path.write_bytes(cubin)
        return disassemble(path)


def function_faults(text: str, volatile_loads: int, local_bytes: int = 0) -> list[str]:
    """Return what is wrong with a function's machine code. `volatile_loads` are those of its PTX."""
    found, code = [], operations(text)
    local = sorted({each for each in code if each.startswith(_LOCAL)})
    if local or local_bytes:
        found.append(f"local memory: {', '.join((f'{local_bytes} bytes', *local))}")
    strong = sum(bool(_STRONG_LOAD.match(each)) for each in code)
    # Code that is there twice has them twice; none may get lost or plain.
    if strong < volatile_loads:
        found.append(f"{strong} loads see other writers, but {volatile_loads} are volatile in the PTX")
    for loop in innermost_loops(text, _SLEEP):
        read = [each for line in loop for each in operations(_as_line(line)) if each.startswith("LD")]
        plain = [each for each in read if each.startswith("LDG") and not _STRONG_LOAD.match(each)]
        if plain or not any(_STRONG_LOAD.match(each) for each in read):
            found.append(f"a wait reads its flag by {', '.join(plain) or 'no load'}")
    if _SLEEP in code and not any(_is_full_fence(code, at) for at in range(code.index(_SLEEP), len(code))):
        found.append("no fence for the system that empties the cache is behind a wait")
    return found


def _as_line(instruction: str) -> str:
    return f"/*0000*/ {instruction} ;"


def _is_full_fence(code: list[str], at: int) -> bool:
    return bool(_FENCE.match(code[at])) and _EMPTY_CACHE in code[at + 1 : at + 1 + _MOST_BETWEEN]


@cache
def missing_later_ptxas() -> str:
    """Return why the later assembler cannot be used; empty if it can."""
    if LATER_PTXAS.is_file():
        said = subprocess.run([LATER_PTXAS, "--version"], capture_output=True, text=True, check=False).stdout
        if (found := re.search(r"release (\d+)", said)) and int(found[1]) >= LATER_RELEASE:
            return ""
    return f"needs ptxas {LATER_RELEASE} as {LATER_PTXAS}"


def later_faults(code: DeviceCode) -> list[str]:
    """Return a line for each function that the later assembler gives more registers than it may, or local memory."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "device.ptx", Path(folder) / "device.cubin"
        source.write_text(code.ptx, encoding="utf-8")
        subprocess.run([LATER_PTXAS, f"-arch=sm_{code.sm}", source, "-o", target], check=True, capture_output=True)
        later = function_resources(target.read_bytes())
    return [
        f"{name}: {later[name].registers} registers by ptxas {LATER_RELEASE} instead of {pinned.registers}, "
        f"{later[name].local_bytes} bytes of local memory"
        for name, pinned in function_resources(code.cubin).items()
        if later[name].registers > pinned.registers + MOST_MORE_REGISTERS or later[name].local_bytes
    ]
