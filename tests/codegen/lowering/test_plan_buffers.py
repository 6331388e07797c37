"""Buffers that live at the same time never overlap, and the plan is no larger than it must be."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from picompile_codegen.lowering.arena import ALIGNMENT_BYTES
from picompile_codegen.lowering.function import plan_buffers
from picompile_codegen.lowering.program import Arg, ProgramCall, ProgramTensor, tensor_bytes


def _call(*names: str) -> ProgramCall:
    return ProgramCall("k", tuple(Arg("buffer", name) for name in names), "op", None, 0)


@st.composite
def _functions(draw: st.DrawFn) -> tuple[list[ProgramCall], dict[str, ProgramTensor]]:
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    buffers = {f"b{i}": ProgramTensor("float32", (size,)) for i, size in enumerate(sizes)}
    name = st.sampled_from(sorted(buffers))
    calls = draw(st.lists(st.lists(name, min_size=1, max_size=4), min_size=1, max_size=20))
    return [_call(*names) for names in calls], buffers


@given(_functions(), st.integers(0, 5))
def test_live_buffers_are_disjoint(
    function: tuple[list[ProgramCall], dict[str, ProgramTensor]], base_units: int
) -> None:
    calls, buffers = function
    base = base_units * ALIGNMENT_BYTES
    planned, end = plan_buffers(calls, buffers, base)
    touched = [{arg.name for arg in call.args} for call in calls]
    assert set(planned) == set().union(*touched)
    lives, places = {}, {}
    for name, tensor in planned.items():
        at = [i for i, names in enumerate(touched) if name in names]
        lives[name] = set(range(at[0], at[-1] + 1))
        assert tensor.offset is not None and tensor.offset % ALIGNMENT_BYTES == 0
        places[name] = (tensor.offset, tensor.offset + tensor_bytes(tensor.dtype, tensor.shape))
        assert base <= places[name][0] and places[name][1] <= end
    for a, b in combinations(planned, 2):
        if lives[a] & lives[b]:
            assert places[a][1] <= places[b][0] or places[b][1] <= places[a][0], (a, b)


def test_a_chain_of_buffers_takes_the_memory_of_two() -> None:
    buffers = {f"b{i}": ProgramTensor("float32", (64,)) for i in range(10)}
    calls = [_call(f"b{i}", f"b{i + 1}") for i in range(9)]
    _, end = plan_buffers(calls, buffers, 0)
    assert end == 2 * 64 * 4
