"""The gate itself: one artifact, one text, read with every neuron and as it generates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from picompile.progress import NoProgress, Progress


@dataclass(frozen=True)
class GateResult:
    """Perplexity of an artifact with every neuron (`dense`) and with its predictors, over `tokens` predicted tokens."""

    dense_perplexity: float
    perplexity: float
    tokens: int

    @property
    def relative_change(self) -> float:
        """How far the predictors raise the perplexity; negative where they lower it."""
        return self.perplexity / self.dense_perplexity - 1


def check_artifact(
    artifact: Path, windows: Sequence[Sequence[int]], threads: int | None = None, progress: Progress | None = None
) -> GateResult:
    """Reads `windows` of token ids twice with the artifact in `artifact`: dense, in chunks, and token by token.

    No window may be longer than the context and one. Raises what the runtime raises.
    """
    from picompile_runtime import load
    from picompile_runtime.perplexity import Perplexity, perplexity

    progress = progress or NoProgress()
    with load(artifact, threads) as engine:
        total = sum(len(window) - 1 for window in windows)
        found = []
        for title, by_decode in (("gate, every neuron", False), ("gate, predicted neurons", True)):
            nll = 0.0
            with progress.step(title, total) as advance:
                for window in windows:
                    nll += perplexity(engine, window, by_decode=by_decode).nll
                    advance(len(window) - 1)
            found.append(Perplexity(nll, total).perplexity)
    return GateResult(found[0], found[1], total)
