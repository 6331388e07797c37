"""What can be known, and refused, before a model is captured: its texts, and the folder that the profile goes to."""

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.errors import DoesNotFitError, UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.hf import open_checkpoint
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.own_text import own_tokens
from picompile.predictors.profile.profile import PROFILE_FILE, read_description
from picompile.predictors.profile.text import read_calibration
from picompile.predictors.profile.windows import TextWindows, checkpoint_tokenizer, text_windows, window_size
from picompile.progress import Progress
from picompile.version import __version__
from picompile_runtime.devices.memory import in_units

if TYPE_CHECKING:
    from picompile.frontend.captured import ModelFacts


@dataclass(frozen=True)
class ProfileTask:
    """A profile that is to be made. `own_tokens` is the length of the text that the model itself shall write."""

    model: Path
    options: ProfileOptions
    facts: "ModelFacts"
    fingerprint: str
    text: TextWindows
    own_tokens: int

    @property
    def inputs(self) -> str:
        """A hash of all that the profile depends on."""
        options = replace(self.options, calibration=(), held_out=(), overwrite=False)
        parts = [__version__, self.fingerprint, self.text.sha256, self.own_tokens, repr(options)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def prepare(model: Path, options: ProfileOptions, progress: Progress) -> ProfileTask:
    """Reads texts and the checkpoint's headers. Raises `UsageError` and `UnsupportedModelError`."""
    # Only once, for standard input cannot be read again.
    texts, held_out = read_calibration(options.calibration), read_calibration(options.held_out)
    options = replace(options, calibration=texts, held_out=held_out)
    with progress.step("text"):
        checkpoint = open_checkpoint(model)
        facts = checkpoint.facts
        tokenizer = checkpoint_tokenizer(model, facts.vocab)
        text = text_windows(tokenizer, window_size(options, facts.max_positions), options)
    if checkpoint.warning is not None:
        progress.say(checkpoint.warning)
    own = own_tokens(facts.parameters, text.calibration.numel()) if text.library else 0
    if text.library:
        without = "none of the model's own, since that would be too slow or too little"
        added = f"{own} tokens of the model's own" if own else without
        progress.say(f"no calibration text is given; it is {text.sources[0]}, and {added}")
    return ProfileTask(model, options, facts, fingerprint(model), text, own)


def check_kind(output: Path) -> None:
    """Refuses what no profile can be made in. Raises `UsageError`."""
    if output.is_symlink() and not output.exists():
        raise UsageError(f"{output}: a link to nowhere; remove it or choose another output")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: exists and is not a folder; choose another output")


def check_place(output: Path, task: ProfileTask) -> None:
    """Refuses a folder that may not be overwritten, and a disk that is too small.

    Raises `UsageError` or `DoesNotFitError`.
    """
    check_kind(output)
    description = None
    if output.exists():
        description = read_description(output)
        others = [path for path in output.iterdir() if not (path.name.startswith(".") and path.name.endswith(".tmp"))]
        if description is None and others:
            raise UsageError(f"{output}: exists and has no {PROFILE_FILE}, so it is not overwritten")
    if description is not None and description.get("complete") is True and not task.options.overwrite:
        if description.get("inputs") != task.inputs:
            raise UsageError(f"{output}: holds a profile of other inputs; give --force to overwrite it")
    elif description is None:
        _check_disk(output, task)


def _check_disk(output: Path, task: ProfileTask) -> None:
    tokens, hidden = task.text.calibration.numel(), task.facts.hidden
    # Samples of all layers in float16; what is alive of all tokens in float32, old and new.
    needed = min(task.options.samples, tokens) * hidden * 2 * task.facts.layers + 2 * tokens * hidden * 4
    parent = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        wanted, there = in_units(needed, free)
        raise DoesNotFitError(f"{output}: needs about {wanted} on disk, {there} are free; take fewer --samples")
