"""The folder that a profile is made in, and the state of an unfinished profile.

To replace a complete profile, the new one is made in the folder `.begun` inside it, whose content replaces the old
profile in one step at the end. Every file in it appears whole. `state.safetensors` records which segment of which pass
comes next, and holds the live values of every window there; a layer's own file is written before it. So whenever the
process ends, the next one can resume, and repeats at most one segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from picompile.predictors.profile.files import read_notes, write_json
from picompile.predictors.profile.options import PROFILE_FILE
from picompile.predictors.profile.profile import FORMAT, SCHEMA, TOKENS_FILE, read_description
from picompile.predictors.profile.state import StateFile

_STATE_FILE = "state.safetensors"
_SEARCH_FILE = "search.json"
# The description comes last: without it, no file is taken for a profile's.
_FILES = (_STATE_FILE, _SEARCH_FILE, TOKENS_FILE, PROFILE_FILE)
_LAYER_FILES = "layers/[0-9]*.safetensors"
BEGUN_FOLDER = ".begun"
_SEARCHED = {"dense_perplexity", "dense_losses", "losses", "histograms"}


@dataclass(frozen=True)
class ProfileDirectory:
    """The folder of a profile that is being made. `inputs` is a hash of everything that the profile depends on."""

    folder: Path
    inputs: str

    def open(self) -> bool:
        """Prepare the folder; return whether it holds an unfinished profile of the same inputs to resume."""
        for temporary in self.folder.rglob(".*.tmp"):
            temporary.unlink()
        known = (read_description(self.folder) or {}).get("inputs") == self.inputs
        if not known:
            self._clear()
            description = {"format": FORMAT, "schema": SCHEMA, "inputs": self.inputs, "complete": False}
            write_json(self.folder / PROFILE_FILE, description)
        (self.folder / "layers").mkdir(exist_ok=True)
        return known

    def discard(self) -> None:
        """Remove everything that was made, and the folder if nothing else is in it."""
        self._clear()
        for folder in (self.folder / "layers", self.folder):
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()

    def _clear(self) -> None:
        """Remove the files of another run, its description last; other files stay."""
        for path in self.folder.glob(_LAYER_FILES):
            path.unlink()
        for name in _FILES:
            (self.folder / name).unlink(missing_ok=True)

    def read_search(self) -> dict[str, Any]:
        """Return the state of the threshold search; empty if it cannot be read."""
        found = read_notes(self.folder / _SEARCH_FILE)
        return found if found.keys() >= _SEARCHED else {}

    def write_search(self, found: Mapping[str, Any]) -> None:
        """Save the state of the threshold search."""
        write_json(self.folder / _SEARCH_FILE, found)

    @property
    def state(self) -> StateFile:
        """The state of the pass that is under way."""
        return StateFile(self.folder / _STATE_FILE)

    def finish(self, description: Mapping[str, Any]) -> None:
        """Write the description of the complete profile, and remove the files that were only needed to resume."""
        write_json(self.folder / PROFILE_FILE, description)
        self.tidy()

    def tidy(self) -> None:
        """Remove the files that were only needed to resume."""
        for name in (_STATE_FILE, _SEARCH_FILE):
            (self.folder / name).unlink(missing_ok=True)


def belongs_to_profile(path: PurePath) -> bool:
    """Return whether `path`, relative to a profile's folder, is a file of a profile."""
    return str(path) in _FILES or path.match(_LAYER_FILES)
