"""PTX text as kernels with statements. What NVRTC does not write for our kernels is an error.

Names of sections are those of the PTX ISA, version 8.7.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

# Where __launch_bounds__ is missing, a block may have as many threads as any GPU takes.
_MOST_THREADS = 1024

_TEXT = re.compile(r"\S")
_COMMENT = re.compile(r"//[^\n]*")
_HEADER = re.compile(r"\s*\.(?:version [\d.]+|target sm_\d+a?|address_size 64)(?=\s)")
_ENTRY = re.compile(r"\s*\.visible \.entry (\w+)\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+\.u64(?: \.ptr(?: \.global)?(?: \.align \d+)?)?\s+(\w+)")
_BOUNDS = re.compile(r"\.maxntid (\d+), 1, 1|\.minnctapersm \d+|\s+")
# A vector operand begins with a brace, too, but never a statement.
_STATEMENT = re.compile(r"\s*(?:(?P<label>[$\w]+):|(?P<open>\{)|(?P<close>\})|(?P<text>[^\s;{}][^;]*);)")
_GUARD = re.compile(r"@(!?)(%p\d+)\s+(.*)", re.DOTALL)
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.*)")
_RANGE = re.compile(r"(%[a-z]+)<(\d+)>")
_SHARED = re.compile(r"\.shared \.align (\d+) \.[bsuf](\d+) ([$\w]+)(?:\[(\d+)\])?")
# Both are hints: of a loop, and which bytes of the next load are used.
_PRAGMA = re.compile(r'\.pragma "(?:nounroll|used_bytes_mask \d+)"')


class PtxError(Exception):
    """PTX that the translator does not know, or that breaks a rule. The message has the line."""


C_TYPES: Mapping[str, str] = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f16": "uint16_t",
    "f16x2": "uint32_t",
    "f32": "float",
    "pred": "bool",
}
REGISTER_TYPES = frozenset({"pred", "b16", "b32", "b64", "f16", "f32"})


@dataclass(frozen=True)
class Instruction:
    """`guard` is a predicate and whether it is negated, if the instruction has one."""

    line: int
    opcode: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None = None

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}".strip()

    def error(self, why: str) -> PtxError:
        return PtxError(f"line {self.line}: {self}: {why}")


@dataclass(frozen=True)
class PtxKernel:
    """A kernel. What is no instruction among its `statements` is C++: labels, braces, and registers of inner scopes.

    `registers` are the type and the number of each range, by prefix as in `%rd`; `named` are the types of those of
    inner scopes. `shared` has the offset of each shared array, and `shared_bytes` are all of them.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int
    statements: list[Instruction | str] = field(default_factory=list)
    registers: dict[str, tuple[str, int]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    shared_bytes: int = 0

    def instructions(self) -> Iterator[Instruction]:
        return (each for each in self.statements if isinstance(each, Instruction))


def parse(text: str) -> list[PtxKernel]:
    """Return the kernels of a module. Raises `PtxError` for anything else in it."""
    text = _COMMENT.sub("", text.rstrip("\0"))
    place, kernels = 0, []
    while _TEXT.search(text, place):
        header, entry = _HEADER.match(text, place), _ENTRY.match(text, place)
        if entry is None:
            if header is None:
                raise PtxError(f"line {_line(text, place)}: {_first_line(text, place)}: no kernel")
            place = header.end()
            continue
        name, parameters, bounds = entry.groups()
        if _PARAMETER.sub("", parameters).strip(", \n\t"):
            raise PtxError(f"{name}: {parameters}: the stand-in for the driver passes pointers alone")
        if _BOUNDS.sub("", bounds):
            raise PtxError(f"{name}: {bounds.strip()}: not known")
        threads = re.search(r"\.maxntid (\d+)", bounds)
        kernel = PtxKernel(name, tuple(_PARAMETER.findall(parameters)), int(threads[1]) if threads else _MOST_THREADS)
        kernel, place = _with_body(kernel, text, entry.end())
        kernels.append(kernel)
    return kernels


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _first_line(text: str, place: int) -> str:
    return text[place:].strip().partition("\n")[0]


def _with_body(kernel: PtxKernel, text: str, start: int) -> tuple[PtxKernel, int]:
    """Return `kernel` with its statements, from behind its brace on, and the place behind its last brace."""
    arrays: list[tuple[str, int, int]] = []
    place, depth, line, counted = start, 1, _line(text, start), start
    while depth:
        match = _STATEMENT.match(text, place)
        if match is None:
            raise PtxError(f"{kernel.name}: {_first_line(text, place)}: no statement")
        place, begin = match.end(), match.start(match.lastgroup or 0)
        line, counted = line + text.count("\n", counted, begin), begin
        if match["label"]:
            kernel.statements.append(f"{c_label(match['label'])}: ;")
        elif brace := match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
            kernel.statements.extend([brace] if depth else [])
        else:
            statement = " ".join(match["text"].split())
            if registers := _REGISTERS.fullmatch(statement):
                kernel.statements.extend(_declared(kernel, registers, depth, line))
            elif shared := _SHARED.fullmatch(statement):
                arrays.append((shared[3], int(shared[1]), int(shared[2]) // 8 * int(shared[4] or 1)))
            elif not _PRAGMA.fullmatch(statement):
                kernel.statements.append(_instruction(statement, line))
    offsets, size = _offsets(arrays)
    return replace(kernel, shared=offsets, shared_bytes=size), place


def c_label(name: str) -> str:
    """Return the C++ label for a label."""
    return name.replace("$", "_")


def _declared(kernel: PtxKernel, registers: re.Match[str], depth: int, line: int) -> Iterator[str]:
    """Add registers to `kernel`, and yield the declaration of those that an inner scope names one by one."""
    for name in (each.strip() for each in registers[2].split(",")):
        if depth == 1 and (found := _RANGE.fullmatch(name)):
            kernel.registers[found[1]] = registers[1], int(found[2])
        elif registers[1] in REGISTER_TYPES and re.fullmatch(r"[A-Za-z_]\w*", name):
            kernel.named[name] = registers[1]
            yield f"{C_TYPES[registers[1]]} {name};"
        else:
            raise PtxError(f"line {line}: {registers[0]}: not known")


def _instruction(text: str, line: int) -> Instruction:
    if text.startswith("."):
        raise PtxError(f"line {line}: {text}: not known")
    guard = _GUARD.fullmatch(text)
    opcode, _, operands = (guard[3] if guard else text).partition(" ")
    return Instruction(line, opcode, tuple(_split(operands)), (guard[2], bool(guard[1])) if guard else None)


def _split(operands: str) -> Iterator[str]:
    """Yield the operands: separated by commas that are in no vector, {a, b}."""
    for match in re.finditer(r"(\{[^}]*\}|[^,{])+", operands):
        if match[0].strip():
            yield match[0].strip()


def elements(operand: str) -> list[str]:
    """Return the elements of a vector operand; an operand that is none is the only one."""
    return [each.strip() for each in operand.strip("{}").split(",")]


def _offsets(arrays: list[tuple[str, int, int]]) -> tuple[dict[str, int], int]:
    """Return where the arrays of (name, alignment, bytes) begin in a block's shared memory, and its size."""
    offsets, end = {}, 0
    for name, alignment, size in arrays:
        offsets[name] = -(-end // alignment) * alignment
        end = offsets[name] + size
    return offsets, end
