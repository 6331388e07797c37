"""Buffers that live at the same time never overlap, and the plan is no larger than it must be."""

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
    used = {arg.name for call in calls for arg in call.args}
    assert set(planned) == used

    def life(name: str) -> range:
        touched = [i for i, call in enumerate(calls) if any(arg.name == name for arg in call.args)]
        return range(touched[0], touched[-1] + 1)

    def place(name: str) -> tuple[int, int]:
        tensor = planned[name]
        assert tensor.offset is not None
        assert tensor.offset % ALIGNMENT_BYTES == 0
        assert base <= tensor.offset
        assert tensor.offset + tensor_bytes(tensor.dtype, tensor.shape) <= end
        return tensor.offset, tensor.offset + tensor_bytes(tensor.dtype, tensor.shape)

    for a in used:
        for b in used - {a}:
            if set(life(a)) & set(life(b)):
                (a_start, a_end), (b_start, b_end) = place(a), place(b)
                assert a_end <= b_start or b_end <= a_start, (a, b)


def test_a_chain_of_buffers_takes_the_memory_of_two() -> None:
    buffers = {f"b{i}": ProgramTensor("float32", (64,)) for i in range(10)}
    calls = [_call(f"b{i}", f"b{i + 1}") for i in range(9)]
    _, end = plan_buffers(calls, buffers, 0)
    assert end == 2 * 64 * 4


def test_inputs_and_outputs_of_one_call_never_alias() -> None:
    buffers = {"a": ProgramTensor("float32", (16,)), "b": ProgramTensor("float32", (16,))}
    planned, _ = plan_buffers([_call("a", "b")], buffers, 0)
    assert planned["a"].offset != planned["b"].offset
