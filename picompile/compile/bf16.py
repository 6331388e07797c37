"""The driver's step that decides whether prompts are computed in bfloat16: by what it costs in perplexity."""

from dataclasses import dataclass, replace
from typing import Any

from picompile.artifact.code import runs_here
from picompile.artifact.writer import WrittenArtifact
from picompile.config import CompileConfig
from picompile.errors import UsageError
from picompile.predictors.accuracy import AccuracyResult, Losses, compare_readings, first_windows, read_windows
from picompile.predictors.predictor_set import HeldOut, PredictorSet, find_held_out
from picompile.progress import Progress
from picompile_runtime import load

# Both ways read the same text, so that few tokens tell their distance well.
_MOST_TOKENS = 1024


@dataclass(frozen=True)
class Bf16Accuracy:
    """The cost of prompts in bfloat16: `result`, whose dense perplexity is that in float32, on text from `text`.

    `bound` is the share by which they may raise the perplexity, None for any.
    """

    result: AccuracyResult
    text: str
    bound: float | None

    @property
    def met(self) -> bool:
        """Whether the change is within the bound."""
        return self.bound is None or self.result.relative_change <= self.bound

    @property
    def summary(self) -> str:
        """One line that says what was measured."""
        return f"prompts in bfloat16: perplexity {self.result.relative_change:+.3%}, on {self.result.tokens:,} tokens"

    def to_json(self) -> dict[str, Any]:
        """Return what the artifact's report says."""
        return {
            "bound": self.bound,
            "relative_change": self.result.relative_change,
            "interval": self.result.interval,
            "perplexity": self.result.perplexity,
            "float32_perplexity": self.result.dense_perplexity,
            "tokens": self.result.tokens,
            "text": self.text,
        }


def choose_bf16(
    artifact: WrittenArtifact, predictors: PredictorSet | None, config: CompileConfig, progress: Progress
) -> tuple[WrittenArtifact, Bf16Accuracy | None]:
    """Return the artifact, without its code for bfloat16 if that costs too much or nobody can tell, and what it costs.

    Nothing is measured where `config` asks for that code in any case, or for no check.
    """
    code = artifact.contents.code
    with_bf16 = [each for each in code if each.isa.prompts_in_bf16]
    bound = config.finite_bound
    if not with_bf16 or config.bf16 != "auto" or not config.is_checked:
        return artifact, None
    if not runs_here(with_bf16):
        progress.say("this machine cannot check prompts in bfloat16, so they are in float32; --bf16 on does not check")
        return _without_bf16(artifact), None
    try:
        found = _held_out(artifact, predictors, config)
    except UsageError as error:
        progress.say(f"prompts in bfloat16 cannot be checked, so they are in float32: {error}")
        return _without_bf16(artifact), None
    measured = _measure(artifact, found, bound, config, progress)
    if measured.met:
        return artifact, measured
    most = f"more than {100 * (bound or 0):.3g} %"
    progress.say(f"{measured.summary}; that is {most}, so they are in float32; --bf16 on takes it anyway")
    return _without_bf16(artifact), measured


def _held_out(artifact: WrittenArtifact, predictors: PredictorSet | None, config: CompileConfig) -> HeldOut:
    checkpoint = artifact.contents.checkpoint
    if checkpoint is None or artifact.contents.tokenizer.tokenizer_json is None:
        raise UsageError("the model has no tokenizer")
    return predictors.held_out if predictors is not None else find_held_out(checkpoint, config)


def _measure(
    artifact: WrittenArtifact, found: HeldOut, bound: float | None, config: CompileConfig, progress: Progress
) -> Bf16Accuracy:
    tokens = min(config.check_tokens, _MOST_TOKENS)
    windows = first_windows(found.windows, tokens, config.context + 1)
    with progress.step("prompts in bfloat16", 2 * sum(len(window) - 1 for window in windows)) as advance:

        def read(in_bf16: bool) -> "list[Losses]":
            code = next(each for each in artifact.contents.code if each.isa.prompts_in_bf16 == in_bf16)
            with load(artifact.folder, isa=code.isa.name) as engine:
                return read_windows(engine, windows, "chunks", advance)

        result = compare_readings(read(in_bf16=False), read(in_bf16=True))
    return Bf16Accuracy(result, found.source, bound)


def _without_bf16(artifact: WrittenArtifact) -> WrittenArtifact:
    """Return the artifact without its code for bfloat16. Program and manifest are to be written anew."""
    kept = [each for each in artifact.contents.code if not each.isa.prompts_in_bf16]
    for each in artifact.contents.code:
        if each not in kept:
            (artifact.folder / each.file).unlink()
    return replace(artifact, contents=replace(artifact.contents, code=kept))
