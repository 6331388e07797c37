"""A format for each matrix of a quantized checkpoint, so that it keeps the numbers it has: `--quant stored`.

A matrix that plain numbers make, or numbers that no format of ours has, is in a format that rounds it hardly: float16,
or q8 where it had fewer bits. Neurons on an accelerator, whose memory is small, may take fewer bits than q8.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch.fx import GraphModule

from picompile.choices import DEFAULT_QUANT, STORED
from picompile.errors import UsageError
from picompile.frontend.captured import Captured
from picompile.frontend.matrix_uses import MatrixUse, matrix_uses
from picompile_passes.formats import FORMATS
from picompile_passes.graph.materialize import WeightSource

# Formats of matrices whose numbers cannot be kept: of what was plain, and of what had codes.
_PLAIN, _ROUNDED = "f16", "q8"
# That of neurons on an accelerator, where the codes of a block have so many bits or fewer, on average.
_ROUNDED_BY_BITS = {5: "q4m", 6: "q6"}


def stored_formats(weights: WeightSource) -> Mapping[str, str | None]:
    """Return the format that has the numbers of each quantized matrix of `weights`, None where no format has them."""
    stored: Callable[[], Mapping[str, str | None]] | None = getattr(weights, "stored", None)
    return {} if stored is None else stored()


def default_quant(quant: str | None, weights: WeightSource, *, calibrated: bool = False) -> str:
    """Return the weight format of a model: `quant` if given, else `stored` for a quantized checkpoint.

    With calibrated rounding it is the default of other checkpoints.

    Raises:
        UsageError: `quant` is `stored`, but the checkpoint is not quantized.
    """
    is_stored = bool(stored_formats(weights))
    if quant == STORED and not is_stored:
        raise UsageError(f"quant {STORED} given, but the checkpoint is not quantized; choose a format")
    return quant or (STORED if is_stored and not calibrated else DEFAULT_QUANT)


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


def choose_stored(
    captured: Captured, graph_module: GraphModule, *, hot_by_outputs: bool = False, on_accelerator: bool = False
) -> StoredChoice:
    """Return a format for each quantized matrix of a predicted graph: its own wherever all kernels read it so.

    `hot_by_outputs` is as in `CompileConfig`. With an accelerator, neurons that are read one by one get q4m if their
    block's codes have 5 bits or fewer on average, q6 up to 6 bits, and q8 else; without one, always q8.
    """
    stored = stored_formats(captured.weights)
    uses = list(matrix_uses(graph_module, hot_by_outputs=hot_by_outputs))
    blocks = {
        layer: _block_format([stored.get(use.parameter) for use in group], few_bits=on_accelerator)
        for layer, group in groupby(filter(_is_neuron, uses), key=lambda use: use.layer)
    }
    # The matrices of a block whose neurons may be skipped, or of which one is plain, are read together.
    plain = {use.layer for use in uses if _is_neuron(use) and use.parameter not in stored}
    formats, rounded = dict[str, str](), dict[str, str]()
    for use in uses:
        if use.parameter not in stored:
            continue
        own, is_plain = stored[use.parameter], _is_neuron(use) and use.layer in plain
        together = blocks[use.layer] if _is_neuron(use) else None
        in_rows = own is not None and FORMATS[own].rows and not use.transposed and together in (own, None)
        if own is None or is_plain or not (use.in_panels or in_rows):
            rounded[use.parameter] = _PLAIN if is_plain else together or _ROUNDED
        else:
            formats[use.parameter] = own
    return StoredChoice(formats | rounded, Counter(rounded.values()))


def _is_neuron(use: MatrixUse) -> bool:
    return use.role in ("ffn", "down")


def _block_format(formats: Sequence[str | None], *, few_bits: bool) -> str:
    """Return the format that a block's matrices, which have numbers of `formats`, get where neurons are read alone."""
    if not few_bits or None in formats:
        return _ROUNDED
    bits = sum(FORMATS[form].data_bits for form in formats if form is not None) / len(formats)
    return next((form for most, form in _ROUNDED_BY_BITS.items() if bits <= most), _ROUNDED)
