"""The folder that a profile is made in, and how far the making has come.

Where a complete profile is to be replaced, that is the folder `.begun` inside it, whose content takes the place of what
was there in one step at the end. Everything in it appears whole. `state.safetensors` says which segment of which pass
is next and holds what is alive of every window there; a layer's own file is in place before it. So whenever the process
ends, the next one has what it needs, and does again at most one segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from picompile.errors import UsageError
from picompile.predictors.profile.files import read_notes, read_tensors, write_json, write_tensors
from picompile.predictors.profile.profile import FORMAT, PROFILE_FILE, SCHEMA, TOKENS_FILE, read_description
from picompile.streaming import Segment, State, new_states

_STATE_FILE = "state.safetensors"
_SEARCH_FILE = "search.json"
# The description last: without it, nothing is a profile's.
_FILES = (_STATE_FILE, _SEARCH_FILE, TOKENS_FILE, PROFILE_FILE)
_LAYER_FILES = "layers/[0-9]*.safetensors"
BEGUN_FOLDER = ".begun"
_SEARCHED = {"dense_perplexity", "perplexities", "histograms"}


@dataclass(frozen=True)
class ProfileDirectory:
    """A folder of a profile that is being made, of `inputs`: a hash of all that it depends on."""

    folder: Path
    inputs: str

    def open(self) -> bool:
        """Makes the folder ready; says whether it holds something of the same inputs to go on with."""
        for temporary in self.folder.rglob(".*.tmp"):
            temporary.unlink()
        known = description_inputs(self.folder) == self.inputs
        if not known:
            self._clear()
            description = {"format": FORMAT, "schema": SCHEMA, "inputs": self.inputs, "complete": False}
            write_json(self.folder / PROFILE_FILE, description)
        (self.folder / "layers").mkdir(exist_ok=True)
        return known

    def discard(self) -> None:
        """Removes all that was made, and the folder if nothing else is in it."""
        self._clear()
        for folder in (self.folder / "layers", self.folder):
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()

    def _clear(self) -> None:
        """Removes what another run left, its description last; nothing that is not a profile's."""
        for path in self.folder.glob(_LAYER_FILES):
            path.unlink()
        for name in _FILES:
            (self.folder / name).unlink(missing_ok=True)

    def read_search(self) -> dict[str, Any]:
        """What the search for thresholds has found so far; nothing where that cannot be read."""
        found = read_notes(self.folder / _SEARCH_FILE)
        return found if found.keys() >= _SEARCHED else {}

    def write_search(self, found: Mapping[str, Any]) -> None:
        """Notes what the search has found."""
        write_json(self.folder / _SEARCH_FILE, found)

    def save_state(self, pass_name: str, segment: int, states: Sequence[State], extra: Mapping[str, Tensor]) -> None:
        """Notes what is alive of each window before segment number `segment` of a pass."""
        tensors = dict(extra)
        for index, state in enumerate(states):
            # The tokens and positions are known anyway.
            alive = [value for node, value in state.items() if node.op != "placeholder"]
            tensors |= {f"windows.{index}.{number}": value for number, value in enumerate(alive)}
        write_tensors(self.folder / _STATE_FILE, tensors, {"pass": pass_name, "segment": str(segment)})

    def load_state(
        self, pass_name: str, graph_module: GraphModule, segments: Sequence[Segment], windows: Sequence[Sequence[int]]
    ) -> tuple[int, list[State], dict[str, Tensor]]:
        """The number of the next segment of a pass, the states before it, and what else was saved."""
        states = new_states(graph_module, windows)
        try:
            tensors, metadata = read_tensors(self.folder / _STATE_FILE)
            if metadata.get("pass") != pass_name:
                return 0, states, {}
            number = int(metadata["segment"])
            outputs = segments[number - 1].outputs
            alive = [
                {node: tensors.pop(f"windows.{index}.{place}") for place, node in enumerate(outputs)}
                for index in range(len(states))
            ]
        except (UsageError, KeyError, ValueError, IndexError):
            # There is none, or a disk lost a part of it.
            return 0, states, {}
        return number, [state | values for state, values in zip(states, alive, strict=True)], tensors

    def finish(self, description: Mapping[str, Any]) -> None:
        """Writes the description of the complete profile and removes what was only there to go on."""
        write_json(self.folder / PROFILE_FILE, description)
        self.tidy()

    def tidy(self) -> None:
        """Removes what was only there to go on."""
        for name in (_STATE_FILE, _SEARCH_FILE):
            (self.folder / name).unlink(missing_ok=True)


def belongs_to_profile(path: PurePath) -> bool:
    """Whether `path`, relative to a profile's folder, is of a file that belongs to a profile."""
    return str(path) in _FILES or path.match(_LAYER_FILES)


def description_inputs(folder: Path) -> str | None:
    """The inputs of the profile, complete or not, in a folder; None where there is none."""
    content = read_description(folder)
    return None if content is None else str(content.get("inputs"))
