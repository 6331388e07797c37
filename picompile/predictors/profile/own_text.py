"""Text that the model itself generates: what it will read when it generates."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from picompile.predictors.profile.windows import cut_windows
from picompile.progress import Progress

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
    model: Path, count: int, window: int, starts: Sequence[Sequence[int]], seed: int, progress: Progress
) -> Tensor:
    """Return windows of text sampled from the model at temperature 1: int32 [windows, window], about `count` tokens.

    Each text begins with one of `starts`, in turn. The model is compiled for this, into a temporary folder. Raises what
    compiling and generating raise.
    """
    from picompile.lossless import compile_lossless
    from picompile_codegen.build.object_cache import temporary_folder

    with temporary_folder() as folder:
        artifact = folder / "artifact"
        compile_lossless(model, artifact, window, progress)
        with progress.step("text of the model's own", count) as advance:
            tokens = []
            for piece in _pieces(artifact, count, window, starts, seed):
                tokens += piece
                advance(len(piece))
    return cut_windows(tokens, window)


def _pieces(artifact: Path, count: int, window: int, starts: Sequence[Sequence[int]], seed: int) -> Iterator[list[int]]:
    from picompile_runtime import SamplingParams, Tokenizer, generate, load

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
