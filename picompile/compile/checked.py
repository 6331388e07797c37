"""The driver's checks of a captured model: that it has a usable tokenizer, and that its graph computes what it should.

They take seconds and need no more than a core. Where the other steps are as short, they are made while kernels are
compiled; a model that fails them is refused before anything takes long.
"""

from pathlib import Path

from picompile.choices import FOUR_BITS, is_budget
from picompile.compile.comparison import require_comparable
from picompile.config import CompileOptions
from picompile.frontend.captured import Captured
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.frontend.tokenizer_files import TokenizerFiles
from picompile.progress import Progress


class ModelChecks:
    """The checks of one model. Calling them returns its tokenizer; later calls return, or raise, the same."""

    def __init__(
        self, checkpoint: Path | None, captured: Captured, options: CompileOptions, progress: Progress
    ) -> None:
        """`checkpoint` is the model's folder or file, None for a module in memory."""
        self._checkpoint, self._captured, self._options, self._progress = checkpoint, captured, options, progress
        self._found: TokenizerFiles | None = None
        self._error: Exception | None = None

    def __call__(self) -> TokenizerFiles:
        """Return the tokenizer.

        Raises:
            UsageError: a text is to be read, and there is no tokenizer.
            UnsupportedModelError: the tokenizer cannot be read, or the graph computes something else than the model.
        """
        if self._error is not None:
            raise self._error
        if self._found is None:
            try:
                self._found = self._check()
            except Exception as error:
                self._error = error
                raise
        return self._found

    def _check(self) -> TokenizerFiles:
        with self._progress.step("tokenizer"):
            tokenizer = read_tokenizer(self._checkpoint, self._captured.facts.vocab)
        for line in filter(None, (tokenizer.reason, *tokenizer.notes)):
            self._progress.say(line)
        require_comparable(self._options, tokenizer)
        if self._checkpoint is not None and self._captured.prove is not None:
            with self._progress.step("prove"):
                self._captured.prove()
        return tokenizer


def takes_long(options: CompileOptions, quant: str) -> bool:
    """Return whether steps before the kernels read a text or all weights; `quant` is the weight format."""
    is_short = options.is_lossless and options.skip is None and options.back_end is None and options.plan is None
    return not is_short or options.calibrates or is_budget(quant) or quant == FOUR_BITS
