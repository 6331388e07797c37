"""Generate with token ids instead of text, for models that came without a tokenizer."""

from collections.abc import Sequence

from picompile_runtime.engine.engine import Engine
from picompile_runtime.sampling.generate import Generation, StopFinder
from picompile_runtime.sampling.sampler import SamplingParams
from picompile_runtime.sampling.speculation import speculate
from picompile_runtime.sampling.tokenizer import StreamDecoder


class IdDecoder(StreamDecoder):
    """Writes tokens as their numbers, separated by commas, so that the output can be given to `--ids` again."""

    def __init__(self) -> None:
        self._first = True

    def push(self, token: int) -> str:
        """Return the number of one token as text."""
        separator, self._first = ("" if self._first else ","), False
        return f"{separator}{token}"

    def flush(self) -> str:
        """Return nothing: no text is ever held back."""
        return ""


def generate_ids(engine: Engine, ids: Sequence[int], params: SamplingParams, max_tokens: int, draft: str) -> Generation:
    """Return what `picompile_runtime.generate` returns, with numbers for text."""
    speculation = speculate(draft, engine.most_checked)
    engine.reset()
    engine.check(ids)
    return Generation(
        engine,
        decoder=IdDecoder(),
        prompt_tokens=list(ids),
        params=params,
        max_tokens=max_tokens,
        stop=StopFinder(()),
        speculation=speculation,
    )
