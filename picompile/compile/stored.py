"""`--quant stored`: a format for each matrix of a quantized checkpoint, so that it keeps the numbers it has.

A matrix that plain numbers make, or numbers that no format of ours has, is in a format that rounds it hardly: float16,
or q8 where it had fewer bits.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from picompile.choices import DEFAULT_QUANT, STORED
from picompile.compile.matrix_uses import matrix_uses
from picompile.config import CompileConfig, CompileOptions
from picompile.errors import UsageError
from picompile.frontend.captured import Captured
from picompile_passes.formats import FORMATS
from picompile_passes.graph.materialize import WeightSource

# Formats of matrices whose numbers cannot be kept: of what was plain, and of what had codes.
_PLAIN, _ROUNDED = "f16", "q8"
# On an accelerator, whose memory is small, of what had codes of so many bits or fewer.
_ROUNDED_BY_BITS = {5: "q4m", 6: "q6"}


def stored_formats(weights: WeightSource) -> Mapping[str, str | None]:
    """Return the format that has the numbers of each quantized matrix of `weights`, None where no format has them."""
    stored: Callable[[], Mapping[str, str | None]] | None = getattr(weights, "stored", None)
    return {} if stored is None else stored()


def default_quant(options: CompileOptions, captured: Captured) -> str:
    """Return the weight format of a model where the user leaves it open: `stored` for quantized ones.

    Calibration rounds anew: with it, it is another.

    Raises:
        UsageError: the user asks for the stored numbers of a checkpoint that is not quantized.
    """
    is_stored = bool(stored_formats(captured.weights))
    if options.quant == STORED and not is_stored:
        raise UsageError(f"quant {STORED} given, but the checkpoint is not quantized; choose a format")
    return STORED if is_stored and options.rounding != "calibrated" else DEFAULT_QUANT


@dataclass(frozen=True)
class StoredChoice:
    """Formats of matrices, by their parameters. `rounded` counts those that are rounded, by the format they get."""

    formats: Mapping[str, str]
    rounded: Counter[str] = field(default_factory=Counter)

    @property
    def text(self) -> str:
        """One line about what is kept."""
        kept = Counter(self.formats.values()) - self.rounded
        found = f"weights as the checkpoint has them: {_counted(kept)}"
        if not self.rounded:
            return found
        return f"{found}; rounded again, because no kernel reads their numbers so: {_counted(self.rounded)}"


def _counted(formats: Counter[str]) -> str:
    return ", ".join(f"{count} matrices in {name}" for name, count in formats.most_common()) or "none"


def choose_stored(captured: Captured, graph_module: GraphModule, config: CompileConfig) -> StoredChoice:
    """Return a format for each quantized matrix of a predicted graph: its own wherever all kernels read it so."""
    stored = stored_formats(captured.weights)
    uses = list(matrix_uses(graph_module, hot_by_outputs=config.hot_by_outputs))
    # The matrices of a block whose neurons may be skipped, or of which one is plain, are read together.
    plain = {use.layer for use in uses if use.role in ("ffn", "down") and use.parameter not in stored}
    formats, rounded = dict[str, str](), dict[str, str]()
    for use in uses:
        if use.parameter not in stored:
            continue
        own, is_neuron = stored[use.parameter], use.role in ("ffn", "down")
        is_plain = is_neuron and use.layer in plain
        # Neurons are read together, in one format.
        in_rows = own is not None and FORMATS[own].rows and not use.transposed and (not is_neuron or own == _ROUNDED)
        if own is None or is_plain or not (use.in_panels or in_rows):
            rounded[use.parameter] = _PLAIN if is_plain else _rounded(own, on_accelerator=config.back_end is not None)
        else:
            formats[use.parameter] = own
    return StoredChoice(formats | rounded, Counter(rounded.values()))


def _rounded(own: str | None, *, on_accelerator: bool) -> str:
    """Return the format that a matrix is rounded to whose numbers are those of `own`, or of no format of ours."""
    if own is None or not on_accelerator:
        return _ROUNDED
    return next((form for bits, form in _ROUNDED_BY_BITS.items() if FORMATS[own].data_bits <= bits), _ROUNDED)
