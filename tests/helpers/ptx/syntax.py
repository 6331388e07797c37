"""PTX text as kernels with statements. What NVRTC does not write for our kernels is an error.

Names of sections are those of the PTX ISA, version 8.7.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from helpers.ptx.errors import PtxError

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
class Label:
    name: str


@dataclass(frozen=True)
class Scope:
    """A brace inside of a kernel."""

    opens: bool


@dataclass(frozen=True)
class Declared:
    """Registers that a scope inside of a kernel declares."""

    type: str
    names: tuple[str, ...]


Statement = Instruction | Label | Scope | Declared


@dataclass(frozen=True)
class PtxKernel:
    """A kernel: `registers` are the type and the number of each of its ranges, by prefix as in `%rd`.

    `shared` has the offset of each shared array; `shared_bytes` are all of them.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int
    statements: tuple[Statement, ...] = ()
    registers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
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
        kernel = PtxKernel(entry[1], _parameters(entry), _threads(entry))
        kernel, place = _with_body(kernel, text, entry.end())
        kernels.append(kernel)
    return kernels


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _first_line(text: str, place: int) -> str:
    return text[place:].strip().partition("\n")[0]


def _parameters(entry: re.Match[str]) -> tuple[str, ...]:
    declared = [each.strip() for each in entry[2].split(",") if each.strip()]
    found = [_PARAMETER.fullmatch(each) for each in declared]
    for text, match in zip(declared, found, strict=True):
        if match is None:
            raise PtxError(f"{entry[1]}: {text}: the stand-in for the driver passes pointers alone")
    return tuple(match[1] for match in found if match)


def _threads(entry: re.Match[str]) -> int:
    if _BOUNDS.sub("", entry[3]):
        raise PtxError(f"{entry[1]}: {entry[3].strip()}: not known")
    bound = re.search(r"\.maxntid (\d+)", entry[3])
    return int(bound[1]) if bound else _MOST_THREADS


def _with_body(kernel: PtxKernel, text: str, start: int) -> tuple[PtxKernel, int]:
    """Return `kernel` with its statements, from behind its brace on, and the place behind its last brace."""
    statements: list[Statement] = []
    registers: dict[str, tuple[str, int]] = {}
    arrays: list[tuple[str, int, int]] = []
    place, depth, line, counted = start, 1, _line(text, start), start
    while depth:
        match = _STATEMENT.match(text, place)
        if match is None:
            raise PtxError(f"{kernel.name}: {_first_line(text, place)}: no statement")
        place, begin = match.end(), match.start(match.lastgroup or 0)
        line, counted = line + text.count("\n", counted, begin), begin
        if match["label"]:
            statements.append(Label(match["label"]))
        elif match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
            if depth or match["open"]:
                statements.append(Scope(bool(match["open"])))
        else:
            statement = " ".join(match["text"].split())
            if found := _registers(statement, depth, line, registers):
                statements.append(found)
            elif shared := _SHARED.fullmatch(statement):
                arrays.append((shared[3], int(shared[1]), int(shared[2]) // 8 * int(shared[4] or 1)))
            elif not statement.startswith(".reg") and not _PRAGMA.fullmatch(statement):
                statements.append(_instruction(statement, line))
    offsets, size = _offsets(arrays)
    filled = PtxKernel(kernel.name, kernel.parameters, kernel.threads, tuple(statements), registers, offsets, size)
    return filled, place


def _registers(text: str, depth: int, line: int, ranges: dict[str, tuple[str, int]]) -> Declared | None:
    """Add the range of registers that `text` declares to `ranges`, or return those that it names one by one."""
    match = _REGISTERS.fullmatch(text)
    if match is None:
        if text.startswith(".reg"):
            raise PtxError(f"line {line}: {text}: not known")
        return None
    names = [each.strip() for each in match[2].split(",")]
    found = [_RANGE.fullmatch(name) for name in names]
    if depth == 1 and all(found):
        for each in found:
            if each:
                ranges[each[1]] = match[1], int(each[2])
        return None
    if any(re.fullmatch(r"[A-Za-z_]\w*", name) is None for name in names):
        raise PtxError(f"line {line}: {text}: not known")
    return Declared(match[1], tuple(names))


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
