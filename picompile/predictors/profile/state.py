"""The state of an unfinished pass over windows of tokens, in a file from which the next process continues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.fx import GraphModule

from picompile.errors import UsageError
from picompile.predictors.profile.files import read_tensors, write_tensors
from picompile.streaming import Segment, State, new_states


@dataclass(frozen=True)
class StateFile:
    """The file `path`: which segment of which pass comes next, and the live values of every window there.

    It appears whole. A pass that writes the result of a segment before the state behind it repeats at most one segment.
    """

    path: Path

    def save(self, pass_name: str, segment: int, states: Sequence[State], extra: Mapping[str, Tensor]) -> None:
        """Save the live values of each window before segment number `segment` of a pass."""
        tensors = dict(extra)
        for index, state in enumerate(states):
            # Tokens and positions are placeholders, and known anyway.
            alive = [value for node, value in state.items() if node.op != "placeholder"]
            tensors |= {f"windows.{index}.{number}": value for number, value in enumerate(alive)}
        write_tensors(self.path, tensors, {"pass": pass_name, "segment": str(segment)})

    def load(
        self, pass_name: str, graph_module: GraphModule, segments: Sequence[Segment], windows: Sequence[Sequence[int]]
    ) -> tuple[int, list[State], dict[str, Tensor]]:
        """Return the number of the next segment of a pass, the states before it, and the extra tensors."""
        states = new_states(graph_module, windows)
        try:
            tensors, metadata = read_tensors(self.path)
            if metadata.get("pass") != pass_name:
                return 0, states, {}
            following = int(metadata["segment"])
            outputs = segments[following - 1].outputs
            alive = [
                {node: tensors.pop(f"windows.{index}.{number}") for number, node in enumerate(outputs)}
                for index in range(len(states))
            ]
        except (UsageError, KeyError, ValueError, IndexError):
            # There is no state, or the disk lost a part of it.
            return 0, states, {}
        return following, [state | values for state, values in zip(states, alive, strict=True)], tensors
