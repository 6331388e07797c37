"""The state that a loaded engine holds, as arrays."""

from typing import Any

from numpy.typing import NDArray

from picompile_runtime import Engine
from picompile_runtime.devices.memory import array_at
from picompile_runtime.engine.state import HostState


def host_states(engine: Engine) -> dict[str, NDArray[Any]]:
    """Return the state tensors in the host's memory by name, [sequences, *shape of one]."""
    names = {id(tensor): name for name, tensor in engine._program.state.items()}
    placed = [each for state in engine._executor.states for each in state._placed]
    return {
        names[id(tensor)]: array_at(memory._memory, tensor)
        for tensor, memory in placed
        if isinstance(memory, HostState)
    }
