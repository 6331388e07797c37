"""Branches, barriers, fences, and what the lanes of a warp do together, as C++.

Collectives are told apart by their line in the PTX, as the emulation does it with lines of CUDA C.
"""

from collections.abc import Callable, Mapping

from helpers.ptx.operands import Frame
from helpers.ptx.syntax import Instruction, c_label, elements

Translation = Callable[[Frame, Instruction], str]

_MATRIX_TYPES = "f32.f16.f16.f32"
_WIDEST = 32


def _branch(_: Frame, at: Instruction) -> str:
    (target,) = at.operands
    return f"goto {c_label(target)};"


def _barrier(_: Frame, at: Instruction) -> str:
    if at.operands != ("0",):
        raise at.error("the barrier 0 of all threads is known")
    return f"emulated_barrier(emulated::SYNCTHREADS, 0, {at.line});"


def _warp_barrier(frame: Frame, at: Instruction) -> str:
    (mask,) = at.operands
    mask = frame.read(at, mask, "b32")
    return f"emulated_collective(emulated::SYNCWARP, {mask}, 0, 0, {_WIDEST}, {at.line});"


def _ballot(frame: Frame, at: Instruction) -> str:
    target, flag, mask = at.operands
    flag, mask = frame.read(at, flag, "pred"), frame.read(at, mask, "b32")
    call = f"emulated_collective(emulated::BALLOT, {mask}, {flag}, 0, {_WIDEST}, {at.line})"
    return frame.write(at, target, "b32", call)


def _shuffle(frame: Frame, at: Instruction) -> str:
    """Return the exchange with lane `own ^ lanes`; the predicate says whether that is in the own segment."""
    targets, value, lanes, segment, mask = at.operands
    target, _, predicate = targets.partition("|")
    value, lanes, segment, mask = (frame.read(at, each, "b32") for each in (value, lanes, segment, mask))
    call = f"emulated_collective(emulated::SHFL_XOR, {mask}, {value}, {lanes} & 31, ptx_width({segment}), {at.line})"
    if not predicate:
        return frame.write(at, target, "b32", call)
    inside = frame.write(at, predicate, "pred", "inside")
    exchanged = frame.write(at, target, "b32", call)
    return f"{{ bool inside = ptx_in_segment({lanes}, {segment}); {exchanged} {inside} }}"


def _multiply(function: str) -> Translation:
    def translate(frame: Frame, at: Instruction) -> str:
        target, a, b, c = (elements(operand) for operand in at.operands)
        a_read, b_read = ([frame.read(at, each, "b32") for each in operand] for operand in (a, b))
        sums = ", ".join(frame.read(at, each, "f32") for each in c)
        written = " ".join(frame.write(at, each, "f32", f"d[{i}]") for i, each in enumerate(target))
        return (
            f"{{ float d[4] = {{{sums}}}; unsigned a[{len(a)}] = {{{', '.join(a_read)}}}, "
            f"b[{len(b)}] = {{{', '.join(b_read)}}}; {function}(d, a, b, {at.line}); {written} }}"
        )

    return translate


def _load_matrices(function: str) -> Translation:
    def translate(frame: Frame, at: Instruction) -> str:
        targets, address = at.operands
        place = frame.address(at, address, "shared")
        written = " ".join(frame.write(at, each, "b32", f"to[{i}]") for i, each in enumerate(elements(targets)))
        return f"{{ unsigned to[4]; {function}(to, {place}, {at.line}); {written} }}"

    return translate


def _call(text: str) -> Translation:
    return lambda _, at: text


CONTROL: Mapping[str, Translation] = {
    "bra": _branch,
    "bra.uni": _branch,
    "ret": _call("return;"),
    "bar.sync": _barrier,
    "bar.warp.sync": _warp_barrier,
    "vote.sync.ballot.b32": _ballot,
    "shfl.sync.bfly.b32": _shuffle,
    f"mma.sync.aligned.m16n8k16.row.col.{_MATRIX_TYPES}": _multiply("pi_mma_m16n8k16"),
    f"mma.sync.aligned.m16n8k8.row.col.{_MATRIX_TYPES}": _multiply("pi_mma_m16n8k8"),
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": _load_matrices("pi_ldmatrix_x4"),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": _load_matrices("pi_ldmatrix_x4_trans"),
    "cp.async.wait_all": _call("emulated_copies_arrive();"),
    "fence.acq_rel.sys": _call("emulated_fence_acq_rel();"),
    "nanosleep.u32": _call("emulated_sleep();"),
    # An event for a profiler: see pi_loads_first in prelude.cuh.
    "pmevent": _call(";"),
}
