"""Kernels as C++ for the emulation: each PTX instruction becomes a statement, with the instruction as a comment."""

from collections.abc import Iterable
from pathlib import Path

from helpers.ptx.control import CONTROL
from helpers.ptx.memory import access_of, translate_access
from helpers.ptx.operands import Frame, bits_of
from helpers.ptx.rules import RULES
from helpers.ptx.syntax import C_TYPES, Instruction, PtxKernel, elements

_RUNTIME = Path(__file__).with_name("ptx.h")
# What vectors are aligned to at most; the arrays of the emulation have less.
_WINDOW_ALIGNMENT_BYTES = 1024
# "mov" packs two registers into one, or takes it apart: the type of the parts.
_PACKS = {"mov.b32": "b16", "mov.b64": "b32"}


def source_of(kernels: Iterable[PtxKernel]) -> str:
    """Return the C++ source of `kernels`, for `helpers.kernels.emulator.Emulated`.

    All kernels share one window of shared memory, since one block runs at a time. Raises `PtxError` with the line of
    what is not known.
    """
    kernels = list(kernels)
    size = max((kernel.shared_bytes for kernel in kernels), default=0)
    window = f"__shared__ __attribute__((aligned({_WINDOW_ALIGNMENT_BYTES}))) char ptx_window[{size or 1}];\n"
    return "\n".join([_RUNTIME.read_text(encoding="utf-8"), window, *(_kernel(kernel) for kernel in kernels)])


def _kernel(kernel: PtxKernel) -> str:
    frame = Frame(kernel)
    body = [f"  {_statement(frame, each)}" for each in kernel.statements]
    variables: dict[str, list[str]] = {}
    for name, type_name in sorted(frame.used.items()):
        variables.setdefault(C_TYPES[type_name], []).append(name)
    declared = [f"  {c_type} {', '.join(names)};" for c_type, names in variables.items()]
    parameters = ", ".join(f"uint64_t {name}" for name in kernel.parameters)
    head = f'extern "C" __global__ void __launch_bounds__({kernel.threads}) {kernel.name}({parameters}) {{'
    return "\n".join([head, *declared, *body, "}\n"])


def _statement(frame: Frame, statement: Instruction | str) -> str:
    if isinstance(statement, str):
        return statement
    text = _instruction(frame, statement)
    if statement.guard:
        predicate, is_negated = statement.guard
        text = f"if ({'!' if is_negated else ''}{frame.read(statement, predicate, 'pred')}) {{ {text} }}"
    return f"{text}  // {statement.line}: {statement}"


def _instruction(frame: Frame, at: Instruction) -> str:
    if at.opcode == "ld.param.u64":
        return _parameter(frame, at)
    if at.opcode in _PACKS and any(operand.startswith("{") for operand in at.operands):
        return _pack(frame, at)
    if at.opcode in RULES:
        return _computed(frame, at)
    if access := access_of(at):
        return translate_access(frame, at, access)
    if at.opcode not in CONTROL:
        raise at.error("the translator has no rule for it")
    return CONTROL[at.opcode](frame, at)


def _computed(frame: Frame, at: Instruction) -> str:
    rule, (target, *operands) = RULES[at.opcode], at.operands
    if len(operands) != len(rule.sources):
        raise at.error(f"{len(rule.sources)} sources are known")
    sources = [frame.read(at, operand, type_name) for operand, type_name in zip(operands, rule.sources, strict=True)]
    return frame.write(at, target, rule.result, rule.expression.format(*sources))


def _parameter(frame: Frame, at: Instruction) -> str:
    target, source = at.operands
    return frame.write(at, target, "u64", source.strip("[]"))


def _pack(frame: Frame, at: Instruction) -> str:
    """Return the statement of a "mov" of two registers to one of twice the size, or back. The first is the low half."""
    target, source = at.operands
    whole, part = at.opcode.removeprefix("mov."), _PACKS[at.opcode]
    bits = bits_of(part)
    if target.startswith("{"):
        low, high = elements(target)
        halves = (frame.write(at, low, part, "whole"), frame.write(at, high, part, f"whole >> {bits}"))
        return f"{{ {C_TYPES[whole]} whole = {frame.read(at, source, whole)}; {' '.join(halves)} }}"
    low, high = (frame.read(at, each, part) for each in elements(source))
    return frame.write(at, target, whole, f"({C_TYPES[whole]}){high} << {bits} | {low}")
