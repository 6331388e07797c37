"""Preparation of a profile: its texts, including text that the model generates, and its folder."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from picompile.artifact.lossless import compile_lossless
from picompile.errors import UsageError
from picompile.frontend.captured import ModelFacts
from picompile.frontend.checkpoint import fingerprint
from picompile.frontend.hf import open_checkpoint
from picompile.output.place import require_disk_space, require_folder_or_nothing
from picompile.predictors.firing import MAGNITUDE
from picompile.predictors.profile.options import PROFILE_FILE, ProfileOptions
from picompile.predictors.profile.profile import read_description
from picompile.predictors.profile.text import read_calibration
from picompile.predictors.profile.windows import (
    TextWindows,
    checkpoint_tokenizer,
    cut_windows,
    text_windows,
    window_size,
)
from picompile.progress import Progress
from picompile_codegen.build.object_cache import temporary_folder
from picompile_runtime import SamplingParams, Tokenizer, generate, load
from picompile_runtime.version import __version__

# Text that the model itself generates: what it will read when it generates.


# The share of the calibration tokens that the model generates itself.
OWN_SHARE = 0.05

# A limit on parameters times tokens, and so on time. It does not depend on the clock, so that the same model and seed
# give the same text. It takes about 40 s on 2 cores, because a token reads each weight once, at 1.5 GB/s or more.
_WORK = 60e9
_LEAST_TOKENS = 256


def own_tokens(parameters: int, tokens: int) -> int:
    """Return how many tokens a model of `parameters` generates for a text of `tokens`; 0 if it is too large."""
    count = int(min(tokens * OWN_SHARE, _WORK / parameters))
    return count if count >= _LEAST_TOKENS else 0


def own_windows(
    model: Path,
    count: int,
    window: int,
    starts: Sequence[Sequence[int]],
    seed: int,
    progress: Progress,
    activation: str | None = None,
) -> Tensor:
    """Return windows of text sampled from the model at temperature 1: int32 [windows, window], about `count` tokens.

    Each text begins with one of `starts`, in turn. The model is compiled for this, into a temporary folder;
    `activation` is what `load_model` takes. Raises what compiling and generating raise.
    """

    with temporary_folder() as folder:
        artifact = folder / "artifact"
        compile_lossless(model, output=artifact, context=window, progress=progress, activation=activation)
        with progress.step("text of the model's own", count) as advance:
            tokens = []
            for piece in _pieces(artifact, count, window, starts, seed):
                tokens += piece
                advance(len(piece))
    return cut_windows(tokens, window)


def _pieces(artifact: Path, count: int, window: int, starts: Sequence[Sequence[int]], seed: int) -> Iterator[list[int]]:
    with load(artifact) as engine:
        tokenizer = Tokenizer.of(engine.artifact)
        number = 0
        while count > 0:
            start = list(starts[number % len(starts)])
            params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=seed + number)
            generation = generate(engine, tokenizer, start, params, max_tokens=min(count, window - len(start)))
            for _ in generation:
                pass
            yield [*start, *generation.tokens]
            count -= len(generation.tokens)
            number += 1


# Checks before a model is captured: the texts to profile it on, and the folder that the profile goes to.


@dataclass(frozen=True)
class ProfileTask:
    """A profile to be made. `own_tokens` is the length of the text that the model itself shall write."""

    model: Path
    options: ProfileOptions
    facts: ModelFacts
    fingerprint: str
    text: TextWindows
    own_tokens: int

    @property
    def inputs(self) -> str:
        """Return a hash of everything that the profile depends on."""
        options = replace(self.options, calibration=(), held_out=(), overwrite=False)
        parts = [__version__, self.fingerprint, self.text.sha256, self.own_tokens, repr(options)]
        # Magnitude and float32 add nothing, so that profiles from before there was a choice are known again.
        parts += [] if options.by == MAGNITUDE else [options.by]
        parts += ["bf16"] if options.bf16 else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def prepare(model: Path, options: ProfileOptions, progress: Progress) -> ProfileTask:
    """Read the texts and the checkpoint's headers. Raise `UsageError` or `UnsupportedModelError`."""
    # Read only once: standard input cannot be read again.
    texts, held_out = read_calibration(options.calibration), read_calibration(options.held_out)
    options = replace(options, calibration=texts, held_out=held_out)
    with progress.step("text"):
        checkpoint = open_checkpoint(model, options.activation)
        facts = checkpoint.facts
        tokenizer = checkpoint_tokenizer(model, facts.vocab)
        text = text_windows(tokenizer, window_size(options, facts.max_positions), options)
    for line in checkpoint.warnings:
        progress.say(line)
    own = own_tokens(facts.parameters, text.calibration.numel()) if text.library else 0
    if text.library:
        without = "none of the model's own, since that would be too slow or too little"
        added = f"{own} tokens of the model's own" if own else without
        progress.say(f"no calibration text is given; it is {text.sources[0]}, and {added}")
    return ProfileTask(
        model, options, facts, fingerprint=fingerprint(model, options.activation), text=text, own_tokens=own
    )


def check_profile_output(output: Path, task: ProfileTask) -> None:
    """Check that the profile of `task` may and can be written to `output`.

    Raises:
        UsageError: The folder must not be overwritten.
        DoesNotFitError: The disk is too small.
    """
    require_folder_or_nothing(output)
    description = None
    if output.exists():
        description = read_description(output)
        others = [path for path in output.iterdir() if not (path.name.startswith(".") and path.name.endswith(".tmp"))]
        if description is None and others:
            raise UsageError(f"{output}: exists and has no {PROFILE_FILE}, so it is not overwritten")
    if description is not None and description.get("complete") is True and not task.options.overwrite:
        if description.get("inputs") != task.inputs:
            raise UsageError(f"{output}: holds a profile of other inputs; give --overwrite to overwrite it")
    elif description is None:
        _check_disk(output, task)


def _check_disk(output: Path, task: ProfileTask) -> None:
    tokens, hidden = task.text.calibration.numel(), task.facts.hidden
    # The samples of all layers in float16, and the live values of all tokens in float32, old and new.
    needed = min(task.options.samples, tokens) * hidden * 2 * task.facts.layers + 2 * tokens * hidden * 4
    require_disk_space(output, needed, "{output}: needs about {needed} on disk, {free} are free; take fewer --samples")
