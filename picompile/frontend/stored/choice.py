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
from picompile.quantities import counted_matrices
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


def turned_parameters(weights: WeightSource) -> frozenset[str]:
    """Return the parameters whose matrices `weights` holds transposed, as gpt-oss's experts."""
    turned: Callable[[], frozenset[str]] | None = getattr(weights, "turned", None)
    return frozenset() if turned is None else turned()


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
    """Formats of matrices, by their parameters, and why some of them, by theirs, are rounded."""

    formats: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def rounded(self) -> Counter[str]:
        """Numbers of matrices that are rounded, by the format that they get."""
        return Counter(self.formats[name] for name in self.reasons)

    @property
    def text(self) -> str:
        """One line about what is kept, and why the rest is not."""
        kept = Counter(self.formats.values()) - self.rounded
        found = f"weights as the checkpoint has them: {counted_matrices(kept) or 'none'}"
        if not self.reasons:
            return found
        reasons = Counter((self.formats[name], reason) for name, reason in self.reasons.items())
        parts = [f"{counted_matrices({form: count})} ({reason})" for (form, reason), count in reasons.most_common()]
        return f"{found}; rounded again: {', '.join(parts)}"


def choose_stored(
    captured: Captured, graph_module: GraphModule, *, hot_by_outputs: bool = False, on_accelerator: bool = False
) -> StoredChoice:
    """Return a format for each quantized matrix of a predicted graph: its own wherever all kernels read it so.

    `hot_by_outputs` is as in `CompileConfig`. With an accelerator, neurons that are read one by one get q4m if their
    block's codes have 5 bits or fewer on average, q6 up to 6 bits, and q8 else; without one, always q8.
    """
    stored = stored_formats(captured.weights)
    turned = turned_parameters(captured.weights)
    uses = list(matrix_uses(graph_module, hot_by_outputs=hot_by_outputs, turned=turned))
    blocks = {
        layer: _block_format([stored.get(use.parameter) for use in group], few_bits=on_accelerator)
        for layer, group in groupby(filter(_is_neuron, uses), key=lambda use: use.layer)
    }
    # The matrices of a block whose neurons may be skipped, or of which one is plain, are read together.
    plain = {use.layer for use in uses if _is_neuron(use) and use.parameter not in stored}
    formats, rounded, reasons = dict[str, str](), dict[str, str](), dict[str, str]()
    for use in uses:
        if use.parameter not in stored:
            continue
        own, is_plain = stored[use.parameter], _is_neuron(use) and use.layer in plain
        together = blocks[use.layer] if _is_neuron(use) else None
        in_rows = own is not None and FORMATS[own].rows and not use.transposed and together in (own, None)
        if own is None or is_plain or not (use.in_panels or in_rows):
            rounded[use.parameter] = _PLAIN if is_plain else together or _ROUNDED
            reasons[use.parameter] = _reason(use, own, is_plain=is_plain)
        else:
            formats[use.parameter] = own
    return StoredChoice(formats | rounded, reasons)


def _reason(use: MatrixUse, own: str | None, *, is_plain: bool) -> str:
    """Return why a matrix that is used so cannot keep its numbers."""
    if own is None:
        return "no format has their numbers"
    if is_plain:
        return "beside a matrix that is not quantized"
    if _is_neuron(use):
        return "neurons are read one by one"
    return "read by columns" if use.transposed else "their number of rows is no multiple of 16"


def _is_neuron(use: MatrixUse) -> bool:
    return use.role in ("ffn", "down")


def _block_format(formats: Sequence[str | None], *, few_bits: bool) -> str:
    """Return the format that a block's matrices, which have numbers of `formats`, get where neurons are read alone."""
    if not few_bits or None in formats:
        return _ROUNDED
    bits = sum(FORMATS[form].data_bits for form in formats if form is not None) / len(formats)
    return next((form for most, form in _ROUNDED_BY_BITS.items() if bits <= most), _ROUNDED)
